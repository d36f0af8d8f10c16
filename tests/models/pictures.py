"""Tiny random checkpoints of models that take pictures, as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.many import Checkpoint, saved

IMAGE_TOKEN = 300
SIDE = 32  # of a picture, in pixels
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}
# name -> architecture without "ForConditionalGeneration", model type of the text, what its config
# has besides, what its vision_config has besides
PICTURES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        "gemma3_text",
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN},
        {"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    "llava": (
        "Llava",
        "llama",
        {"image_seq_length": 16, "image_token_index": IMAGE_TOKEN},
        {"model_type": "clip_vision_model"},
    ),
    "llava-siglip": (
        "Llava",
        "qwen2",
        {
            "image_seq_length": 16,
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    "smolvlm": ("SmolVLM", "llama", {"scale_factor": 2, "image_token_id": IMAGE_TOKEN}, {}),
    # Positions of patches are fractions of 7, which are not exact.
    "idefics3": (
        "Idefics3",
        "llama",
        {"scale_factor": 7, "image_token_id": IMAGE_TOKEN},
        {"image_size": 56},
    ),
}


def make_with_pictures(
    name: str, folder: Path, *, mm_tokens_per_image: int = 0, **text: Any
) -> Checkpoint:
    """A checkpoint in `folder`; `text`: what its text_config has besides."""
    kind, text_type, outer, vision = PICTURES[name]
    if mm_tokens_per_image:
        outer = {**outer, "mm_tokens_per_image": mm_tokens_per_image}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **text, "model_type": text_type, "pad_token_id": 0},
        vision_config={**VISION, **vision},
        attn_implementation="eager",
        **outer,
    )
    return saved(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)


def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What transformers' encoder makes of a picture [3, side, side]: [tokens, hidden]"""
    batch = pixels[None]
    chosen: dict[str, Any] = {}
    if "SmolVLM" in type(model).__name__ or "Idefics3" in type(model).__name__:
        batch = batch[None]
    if hasattr(model.config, "vision_feature_layer"):
        chosen["vision_feature_layer"] = model.config.vision_feature_layer
        chosen["vision_feature_select_strategy"] = model.config.vision_feature_select_strategy
    found = model.model.get_image_features(batch, **chosen).pooler_output
    if isinstance(found, list | tuple):
        (found,) = found
    return found.reshape(-1, found.shape[-1])  # type: ignore[no-any-return]


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 4,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 1000.0},
}


def make_pixtral(name: str, folder: Path) -> Checkpoint:
    shared: dict[str, Any] = {"image_token_index": IMAGE_TOKEN, "attn_implementation": "eager"}
    text = {**TEXT, "model_type": "mistral", "pad_token_id": 0, "sliding_window": None}
    if name == "llava":
        # The last layer is not looked at.
        llava = transformers.LlavaConfig(
            text_config=text,
            vision_config={**PIXTRAL, "hidden_act": "silu"},
            vision_feature_layer=-2,
            vision_feature_select_strategy="full",
            **shared,
        )
        return saved(transformers.LlavaForConditionalGeneration(llava), folder)
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config={**PIXTRAL, "hidden_act": "gelu"},
        tie_word_embeddings=False,
        **shared,
    )
    return saved(transformers.Mistral3ForConditionalGeneration(config), folder)


GEMMA4_TYPES = ["sliding_attention", "full_attention"] * 2
# name -> what its text_config and its vision_config have besides
GEMMA4: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # With inputs for each layer, K and V of earlier layers, and limits of the encoder's products.
    "small": (
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "num_kv_shared_layers": 2,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
        },
        {"use_clipped_linears": True},
    ),
    # Tokens of a picture see each other in layers with windows.
    "large": (
        {
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        {"standardize": True},
    ),
}
GEMMA4_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}


AUDIO_TOKEN = 301
GEMMA4_AUDIO: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "subsampling_conv_channels": [16, 6],
    "conv_kernel_size": 3,
    "attention_chunk_size": 5,
    "attention_context_left": 5,
    "output_proj_dims": 40,
}


def make_gemma4(
    name: str, folder: Path, audio: dict[str, Any] | None = None, **vision: Any
) -> Checkpoint:
    """`vision`: what its vision_config has besides; `audio`: its audio_config, if it hears."""
    of_text, of_vision = GEMMA4[name]
    text = {**TEXT, "num_hidden_layers": 4, "layer_types": GEMMA4_TYPES, "sliding_window": 10}
    config = transformers.Gemma4Config(
        text_config={**text, "global_head_dim": 32, "pad_token_id": 0, **of_text},
        vision_config={**GEMMA4_VISION, **of_vision, **vision},
        image_token_id=IMAGE_TOKEN,
        audio_config=audio,
        audio_token_id=AUDIO_TOKEN,
        attn_implementation="eager",
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(3)
    for part, buffer in model.model.named_buffers():
        if part.endswith(("_min", "_max")):
            bound = 0.3 + torch.rand(buffer.shape, generator=draw)
            buffer.copy_(-bound if part.endswith("_min") else bound)
        elif "std_" in part:
            buffer.copy_(1 + 0.3 * torch.rand(buffer.shape, generator=draw))
    return saved(model, folder)


UNIFIED_SAMPLES = 20  # of a token of sound
UNIFIED_VISION = {
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 48,
    "mm_posemb_size": 32,
    "output_proj_dims": 48,
}


def make_gemma4_unified(folder: Path, pool: int = 2, **text: Any) -> Checkpoint:
    """`pool`: patches per side of a token. `text`: what its text_config has besides."""
    usual = {**TEXT, "num_hidden_layers": 4, "layer_types": GEMMA4_TYPES, "sliding_window": 10}
    usual |= {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = transformers.Gemma4UnifiedConfig(
        text_config={**usual, "pad_token_id": 0, **text},
        vision_config={**UNIFIED_VISION, "pooling_kernel_size": pool},
        audio_config={"audio_embed_dim": UNIFIED_SAMPLES},
        image_token_id=IMAGE_TOKEN,
        audio_token_id=AUDIO_TOKEN,
        attn_implementation="eager",
    )
    return saved(transformers.Gemma4UnifiedForConditionalGeneration(config), folder)


LLAMA4_TEXT = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "floor_scale": 24,
}
LLAMA4_VISION = {
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 8,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
}


def make_llama4(folder: Path, text: Mapping[str, Any] = LLAMA4_TEXT, **vision: Any) -> Checkpoint:
    """`text`, `vision`: what its text_config and its vision_config have besides."""
    config = transformers.Llama4Config(
        text_config={**TEXT, **text, "pad_token_id": 0},
        vision_config={**LLAMA4_VISION, **vision},
        image_token_index=IMAGE_TOKEN,
        attn_implementation="eager",
    )
    return saved(transformers.Llama4ForConditionalGeneration(config), folder)
