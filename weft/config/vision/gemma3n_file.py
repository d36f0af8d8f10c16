"""The encoders of Gemma 3n in a GGUF file (`mmproj.py`): of pictures, and of sounds. All sizes are
those of its tensors; the file does not have what is the same in all models."""

from __future__ import annotations

import math
from typing import Any

from weft.config.model_errors import BadCheckpoint
from weft.config.vision.clip import HEARS, ClipKeys, LayerGroup, Projector
from weft.config.vision.gemma3n import PICTURES, SOUNDS, TEXT_VOCAB
from weft.config.vision.mobilenet import MOST_BLOCKS, MOST_LEVELS
from weft.json_types import JsonMapping, JsonObject

_FIRST = f"{SOUNDS}.subsample_conv_projection"
_BILINEAR = 2
_SOUND_PARTS = {
    "ffn_norm": "ffw_layer_start.pre_layer_norm",
    "ffn_up": "ffw_layer_start.ffw_layer_1",
    "ffn_down": "ffw_layer_start.ffw_layer_2",
    "ffn_post_norm": "ffw_layer_start.post_layer_norm",
    "ffn_norm_1": "ffw_layer_end.pre_layer_norm",
    "ffn_up_1": "ffw_layer_end.ffw_layer_1",
    "ffn_down_1": "ffw_layer_end.ffw_layer_2",
    "ffn_post_norm_1": "ffw_layer_end.post_layer_norm",
    "ln1": "attention.pre_attn_norm",
    "attn_q": "attention.attn.q_proj",
    "attn_k": "attention.attn.k_proj",
    "attn_v": "attention.attn.v_proj",
    "linear_pos": "attention.attn.relative_position_embedding.pos_proj",
    "attn_out": "attention.post",
    "ln2": "attention.post_norm",
    # Files have the names of these two norms the other way round.
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "conv_pw1": "lconv1d.linear_start",
    "conv_dw": "lconv1d.depthwise_conv1d",
    "conv_pw2": "lconv1d.linear_end",
    "layer_pre_norm": "norm",
    # Its name has no part of its own, or ends like a matrix.
    ".per_dim_scale": "attention.attn.per_dim_scale",
    "per_dim_scale.weight": "attention.attn.per_dim_scale",
}


def _config(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    num_pictures, out_size = keys.shape("mm.embedding.weight", 2)
    hears = keys.value(HEARS, bool, False)
    num_sounds, _ = keys.shape("mm.a.embedding.weight", 2) if hears else (128, 0)
    # The tokens of sounds are the last ones, after those of pictures.
    first_sound = found.get("vocab_size", TEXT_VOCAB) - num_sounds
    first_picture = first_sound - num_pictures
    num_tokens = keys.image_size // keys.size("patch_size")
    stem_size, *_ = keys.shape("v.conv_stem.conv.weight", 4)
    args = {
        "stem_size": stem_size,
        "block_args": _levels(keys),
        "msfa_output_resolution": max(math.isqrt(max(num_tokens, 0)), 1),
    }
    config: JsonObject = {
        "vision_config": {
            "hidden_size": out_size,
            "vocab_size": num_pictures,
            "vocab_offset": first_picture,
            "model_args": args,
        },
        "vision_soft_tokens_per_image": num_tokens,
        "eoi_token_id": first_picture,
        "image_token_id": first_picture + 1,
        "eoa_token_id": first_sound,
        "audio_token_id": first_sound + 1,
        # Converters fill up the table of vectors for each layer.
        "has_padded_layer_inputs": True,
    }
    if hears:
        config["audio_config"] = _sounds(keys, num_sounds, first_sound)
    return config


def _levels(keys: ClipKeys) -> list[list[JsonObject]]:
    """The blocks of each level, as timm describes them."""
    parts: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for name, shape in keys.shapes.items():
        head, _, rest = name.partition(".blk.")
        level, _, rest = rest.partition(".")
        number, _, part = rest.partition(".")
        if head == "v" and level.isdecimal() and number.isdecimal():
            parts.setdefault((int(level), int(number)), {})[part] = shape
    levels: list[list[JsonObject]] = []
    while (len(levels), 0) in parts and len(levels) <= MOST_LEVELS:
        blocks: list[JsonObject] = []
        while (len(levels), len(blocks)) in parts and len(blocks) <= MOST_BLOCKS:
            label = f"v.blk.{len(levels)}.{len(blocks)}"
            block = _block(keys, label, parts[len(levels), len(blocks)])
            blocks.append({**block, "stride": 1 if blocks else 2})
        levels.append(blocks)
    return levels


def _block(keys: ClipKeys, label: str, parts: dict[str, tuple[int, ...]]) -> JsonObject:
    def shape(part: str) -> tuple[int, ...]:
        return keys.shape(f"{label}.{part}.weight", 4)

    def kernel(part: str) -> int:
        return shape(part)[-1] if f"{part}.weight" in parts else 0

    if "conv_exp.weight" in parts:
        inner, size, *_ = shape("conv_exp")
        return {
            "block_type": "er",
            "out_chs": shape("conv_pwl")[0],
            "exp_ratio": inner / max(size, 1),
            "exp_kernel_size": kernel("conv_exp"),
        }
    if "pw_exp.conv.weight" in parts:
        inner, size, *_ = shape("pw_exp.conv")
        return {
            "block_type": "uir",
            "out_chs": shape("pw_proj.conv")[0],
            "exp_ratio": inner / max(size, 1),
            "dw_kernel_size_start": kernel("dw_start.conv"),
            "dw_kernel_size_mid": kernel("dw_mid.conv"),
        }
    if "attn.query.proj.weight" in parts:
        head_dim = shape("attn.key.proj")[0]
        is_thinned = "attn.key.down_conv.weight" in parts
        return {
            "block_type": "mqa",
            "out_chs": shape("attn.output.proj")[0],
            "num_heads": shape("attn.query.proj")[0] // max(head_dim, 1),
            "key_dim": head_dim,
            "kv_stride": 2 if is_thinned else 1,
            "dw_kernel_size": kernel("attn.key.down_conv") or 3,
        }
    raise BadCheckpoint(f"{keys.label} has no products in {label}")


def _sounds(keys: ClipKeys, vocab_size: int, first: int) -> JsonObject:
    keys.require_sounds("gemma3na")
    hidden, _ = keys.shape("a.pre_encode.out.weight", 2)
    _, _, kernel = keys.shape("a.blk.0.conv_dw.weight", 3)
    return {
        "vocab_size": vocab_size,
        "vocab_offset": first,
        "input_feat_size": _num_bands(keys),
        "hidden_size": hidden,
        "conf_num_hidden_layers": keys.num_sound_layers,
        "conf_num_attention_heads": keys.value("clip.audio.attention.head_count", int),
        "conf_conv_kernel_size": kernel,
        "sscp_conv_channel_size": [_channels(keys, 0), _channels(keys, 1)],
    }


def _channels(keys: ClipKeys, index: int) -> int:
    [num, *_] = keys.shape(f"a.conv1d.{index}.weight", 4)
    return num


def _num_bands(keys: ClipKeys) -> int:
    """Two convolutions have made a quarter of the bands."""
    _, folded_size = keys.shape("a.pre_encode.out.weight", 2)
    num_channels = max(_channels(keys, 1), 1)
    quarter = folded_size // num_channels
    return max(4 * quarter, 1)


def _settings(keys: ClipKeys) -> JsonObject:
    side = keys.image_size
    settings: dict[str, Any] = {
        **keys.looks,
        "size": {"height": side, "width": side},
        "resample": _BILINEAR,
        "do_normalize": False,
    }
    if keys.value(HEARS, bool, False):
        settings["feature_size"] = _num_bands(keys)
    return settings


def _embedder(prefix: str, name: str) -> dict[str, str]:
    return {
        f"{prefix}.embedding": f"{name}.embedding",
        f"{prefix}.hard_emb_norm": f"{name}.hard_embedding_norm",
        f"{prefix}.soft_emb_norm": f"{name}.soft_embedding_norm",
        f"{prefix}.input_projection": f"{name}.embedding_projection",
    }


_OF_NET = (
    "conv_stem.conv",
    "conv_stem.bn",
    "msfa.ffn.pw_exp.conv",
    "msfa.ffn.pw_exp.bn",
    "msfa.ffn.pw_proj.conv",
    "msfa.ffn.pw_proj.bn",
    "msfa.norm",
)
PROJECTOR = Projector(
    models={"gemma3n": "Gemma3nForConditionalGeneration"},
    config=_config,
    settings=_settings,
    layers=f"{PICTURES}.blocks",
    parts=None,
    outside={
        **{f"v.{part}": f"{PICTURES}.{part}" for part in _OF_NET},
        **_embedder("mm", "embed_vision"),
        **_embedder("mm.a", "embed_audio"),
        "a.conv1d.0": f"{_FIRST}.conv_0.conv",
        "a.conv1d.0.norm": f"{_FIRST}.conv_0.norm",
        "a.conv1d.1": f"{_FIRST}.conv_1.conv",
        "a.conv1d.1.norm": f"{_FIRST}.conv_1.norm",
        "a.pre_encode.out": f"{_FIRST}.input_proj_linear",
    },
    reads=(HEARS,),
    further={"a": LayerGroup(f"{SOUNDS}.conformer", _SOUND_PARTS)},
    vectors=("conv_stem.conv.bias",),
    has_vit=False,
)
