"""A processor of each family that sees, as small as they come."""

from __future__ import annotations

import json
from typing import Any

from weft.text.media.families import PROCESSORS, ProcessorRecipe

VISION = {"image_size": 56, "patch_size": 14, "hidden_size": 32, "num_attention_heads": 2}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
CLIP = {**VISION, "model_type": "clip_vision_model"}
PIXTRAL = {**VISION, "model_type": "pixtral", "patch_size": 7}
SQUARE = {"height": 56, "width": 56}
CUT = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
TILES = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
PADS = {**CUT, "do_pad": True, "image_processor_type": "LlavaImageProcessor"}


def recipe(
    name: str, vision: dict[str, Any], settings: dict[str, Any], **config: Any
) -> ProcessorRecipe:
    architecture = f"{name}ForConditionalGeneration"
    config = {"architectures": [architecture], "vision_config": vision, **config}
    files = {
        "config.json": json.dumps(config),
        "preprocessor_config.json": json.dumps(settings),
    }
    return ProcessorRecipe(PROCESSORS[architecture], files)


RECIPES: dict[str, ProcessorRecipe] = {
    "gemma 3": recipe("Gemma3", SIGLIP, {"size": SQUARE}, mm_tokens_per_image=4),
    "gemma 3 in pieces": recipe(
        "Gemma3", SIGLIP, {"size": SQUARE, "do_pan_and_scan": True}, mm_tokens_per_image=4
    ),
    "smolvlm": recipe("SmolVLM", VISION, TILES, scale_factor=2),
    "llava": recipe("Llava", CLIP, CUT),
    "llava that pads": recipe("Llava", CLIP, PADS),
    "mistral 3": recipe("Mistral3", PIXTRAL, {}, spatial_merge_size=2),
    "qwen2.5-vl": recipe("Qwen2_5_VL", {"tokens_per_second": 2}, {}),
    "qwen3-vl": recipe("Qwen3VL", {}, {}),
}
