"""Tiny random checkpoints of the models of Qwen that see, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.models.many import Checkpoint, saved

IMAGE_TOKEN = 300
VIDEO_TOKEN = 301
START_TOKEN = 302
END_TOKEN = 303
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "rope_parameters": MROPE,
}
OF_3 = {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
}
OF_2_5 = {"window_size": 24, "fullatt_block_indexes": [1, 3]}  # of 3 x 3 tokens
# name -> architecture without "ForConditionalGeneration", model type of the text, what its
# text_config has besides, what its vision_config has besides
QWEN: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "Qwen2VL",
        "qwen2_vl_text",
        {},
        {"embed_dim": 48, "mlp_ratio": 2, "hidden_size": 64},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", "qwen2_5_vl_text", {}, OF_2_5),
    "qwen3-vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        OF_3,
        {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3.5": (
        "Qwen3_5",
        "qwen3_5_text",
        {
            **OF_3,
            "rope_parameters": {
                **MROPE,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {"num_position_embeddings": 49},
    ),
}


# Those that differ in their decoder alone.
WITH_EXPERTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "qwen3_vl_moe_text",
        {
            **OF_3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
    ),
}


def make_qwen(name: str, folder: Path, **text: Any) -> Checkpoint:
    """A checkpoint in `folder`; `text`: what its text_config has besides."""
    kind, text_type, of_text, of_vision = (QWEN | WITH_EXPERTS)[name]
    text_config = {**TEXT, **of_text, **text, "model_type": text_type, "pad_token_id": 0}
    text_config["eos_token_id"] = text_config["bos_token_id"] = None
    config = getattr(transformers, f"{kind}Config")(
        text_config=text_config,
        vision_config={**VISION, **of_vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START_TOKEN,
        vision_end_token_id=END_TOKEN,
        attn_implementation="eager",
    )
    return saved(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)


def features(model: Any, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """What transformers' encoder makes of patches, with a grid of tokens: [tokens, (1 + K)
    hidden]"""
    num_frames, rows, columns = grid
    of_patches = torch.tensor([[num_frames, 2 * rows, 2 * columns]])
    with torch.inference_mode():
        found = model.model.visual(patches, grid_thw=of_patches)
    deep = getattr(found, "deepstack_features", None) or []
    return torch.cat((found.pooler_output, *deep), dim=1)
