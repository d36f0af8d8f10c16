"""Settings of picture processors, as their models' files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.text.media.families import make_processor
from weft.text.media.processor import MediaProcessor

VISION = {"image_size": 56, "patch_size": 14, "hidden_size": 32, "num_attention_heads": 2}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
CLIP = {**VISION, "model_type": "clip_vision_model"}
SQUARE = {"height": 56, "width": 56}
TILES = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
CUT = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}


def made(
    folder: Path, name: str, vision: dict[str, Any], settings: dict[str, Any], **config: Any
) -> MediaProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "vision_config": vision,
        **config,
    }
    processor = make_processor(folder, config)
    assert processor is not None
    return processor


def gemma3(folder: Path, **settings: Any) -> MediaProcessor:
    return made(folder, "Gemma3", SIGLIP, {"size": SQUARE, **settings}, mm_tokens_per_image=4)


def smolvlm(folder: Path, name: str = "SmolVLM", **settings: Any) -> MediaProcessor:
    return made(folder, name, VISION, {**TILES, **settings}, scale_factor=2)


def llava(folder: Path, vision: dict[str, Any] = CLIP, **settings: Any) -> MediaProcessor:
    more = {}
    if vision is SIGLIP:
        more["vision_feature_select_strategy"] = "full"
    return made(folder, "Llava", vision, settings, **more)


PIXTRAL = {**VISION, "model_type": "pixtral", "patch_size": 7}


def pixtral(folder: Path, name: str = "Mistral3", **settings: Any) -> MediaProcessor:
    more = {"spatial_merge_size": 2}
    if name == "Llava":
        more = {"vision_feature_select_strategy": "full"}
    return made(folder, name, PIXTRAL, settings, **more)


GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 2}


def gemma4(folder: Path, **settings: Any) -> MediaProcessor:
    return made(folder, "Gemma4", GEMMA4, {**GEMMA4, **settings})
