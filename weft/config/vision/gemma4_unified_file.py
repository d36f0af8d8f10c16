"""What the unified Gemma 4 has instead of encoders, in a GGUF file (`mmproj.py`). All sizes are
those of its tensors. A patch is colour by colour there, and a table for columns stands before one
for rows."""

from __future__ import annotations

import math

from weft.config.model_errors import BadCheckpoint
from weft.config.vision.clip import HEARS, ClipKeys, Projector
from weft.json_types import JsonMapping, JsonObject

_POOL = 3  # in all models: files have the pixels of a token, which are those of a patch times this
_EMBEDDER = "vision_embedder"


def _config(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    hidden, num_values = keys.shape("v.patch_embd.weight", 2)
    _, num_places, _ = keys.shape("v.position_embd.weight", 3)
    side = math.isqrt(num_values // 3)
    if 3 * side**2 != num_values or side % _POOL:
        raise BadCheckpoint(
            f"{keys.label}: v.patch_embd.weight has {num_values:,} values of a patch; three for "
            f"each pixel of a square are expected, with a side that is a multiple of {_POOL}"
        )
    vision = {
        "patch_size": side // _POOL,
        "pooling_kernel_size": _POOL,
        "mm_embed_dim": hidden,
        "mm_posemb_size": num_places,
        "is_by_colour": True,
    }
    config: JsonObject = {"vision_config": vision}
    if keys.value(HEARS, bool, False):
        keys.require_sounds("gemma4ua")
        config["audio_config"] = {"audio_embed_dim": _num_samples(keys)}
    return config


def _num_samples(keys: ClipKeys) -> int:
    _, num_samples = keys.shape("mm.a.input_projection.weight", 2)
    return num_samples


def _settings(keys: ClipKeys) -> JsonObject:
    settings = {**keys.looks, "do_convert_rgb": True, "do_normalize": False}
    if keys.value(HEARS, bool, False):
        settings["audio_samples_per_token"] = _num_samples(keys)
    return settings


PROJECTOR = Projector(
    models={"gemma4": "Gemma4UnifiedForConditionalGeneration"},
    config=_config,
    settings=_settings,
    layers="",
    parts={},
    outside={
        "v.patch_embd": f"{_EMBEDDER}.patch_dense",
        "v.patch_norm.1": f"{_EMBEDDER}.patch_ln1",
        "v.patch_norm.2": f"{_EMBEDDER}.patch_ln2",
        "v.patch_norm.3": f"{_EMBEDDER}.pos_norm",
        "v.position_embd.weight": f"{_EMBEDDER}.pos_embedding",
        "mm.input_projection": "embed_vision.embedding_projection",
        "mm.a.input_projection": "embed_audio.embedding_projection",
    },
    reads=(HEARS,),
    has_vit=False,
)
