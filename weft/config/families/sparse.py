"""DeepSeek V3.2 and GLM-5: DeepSeek V3, whose tokens attend to the `index_topk` keys that an
indexer chooses for them. Source: arXiv:2512.02556.

In some models of GLM-5's class, layers attend to what an earlier layer has chosen. Contexts of
these end where a token would be left out, and no indexer is computed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from weft.config.config_json import get, size
from weft.config.decoder import DecoderSpec, IndexerSpec, LayerSpec
from weft.config.families import gguf
from weft.config.families.deepseek import (
    GGUF_JOINED,
    GGUF_PARTS,
    gguf_deepseek2,
    read_deepseek3,
)
from weft.config.families.family import Config, Family, flag
from weft.config.families.states import check_lanes
from weft.config.model_errors import BadCheckpoint, UnsupportedModel
from weft.config.numbers import shown
from weft.json_types import JsonMapping, JsonObject

TOPK = "index_topk"
_KINDS = ("F", "S", "full", "shared")  # of layers; patterns have the letters


def _sparse(config: Config, *, side_by_side: bool) -> DecoderSpec:
    spec = read_deepseek3(config)
    if _shares(config):
        return replace(spec, names=replace(spec.names, unread=("self_attn.indexer.",)))
    indexer = _indexer(config, side_by_side)
    layers = tuple(_with_indexer(layer, indexer) for layer in spec.layers)
    return replace(spec, layers=layers)


def _indexer(config: Config, side_by_side: bool) -> IndexerSpec:
    head_dim = size(config, "index_head_dim")
    rotated = size(config, "qk_rope_head_dim")
    check_lanes(head_dim, "index_head_dim")
    check_lanes(rotated + size(config, "kv_lora_rank"), "qk_rope_head_dim + kv_lora_rank")
    size(config, "q_lora_rank")  # its queries need it
    if rotated > head_dim:
        raise UnsupportedModel(
            f"index_head_dim is {head_dim}; it must be at least qk_rope_head_dim, which is "
            f"{rotated}"
        )
    return IndexerSpec(
        heads=size(config, "index_n_heads"),
        head_dim=head_dim,
        num_chosen=size(config, TOPK),
        side_by_side=flag(config, "indexer_rope_interleave", side_by_side),
    )


def _with_indexer(layer: LayerSpec, indexer: IndexerSpec) -> LayerSpec:
    latent = layer.attention.latent
    assert latent is not None
    attention = replace(layer.attention, latent=replace(latent, indexer=indexer))
    return replace(layer, attention=attention)


def _shares(config: Config) -> bool:
    """Whether a layer attends to what an earlier one has chosen. Files list the kinds of layers, or
    have a letter for each, or a period."""
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = config.get(key)
        if not kinds:
            continue
        if not isinstance(kinds, str | list) or any(kind not in _KINDS for kind in kinds):
            raise UnsupportedModel(
                f"{key} is {shown(kinds)}; a list of {' or '.join(map(repr, _KINDS))} is expected"
            )
        return "S" in kinds or "shared" in kinds
    period = get(config, "index_topk_freq", int, 1)
    return period > 1 and size(config, "num_hidden_layers") > 1


def _context(config: Config) -> JsonMapping:
    longest = size(config, "max_position_embeddings")
    if _shares(config):
        longest = min(longest, size(config, TOPK))
    return {"max_position_embeddings": longest}


# GGUF files

SHARES_FROM = 1_048_576  # the context of the first model of GLM-5's class whose layers share


def _gguf_latents(keys: gguf.ArchitectureKeys, found: gguf.Found) -> JsonObject:
    return {**gguf_deepseek2(keys, found), "architectures": found["architectures"]}


def _gguf_sizes(keys: gguf.ArchitectureKeys, found: gguf.Found) -> JsonObject:
    """Nothing further. Raises BadCheckpoint if the tensors of the first indexer have other sizes
    than the keys."""
    indexer = gguf.said(keys, found, _INDEXER)
    head_dim = indexer["index_head_dim"]
    for name, num_rows in (("attn_k", head_dim), ("attn_q_b", indexer["index_n_heads"] * head_dim)):
        found_rows = keys.num_rows(f"blk.0.indexer.{name}.weight")
        if found_rows != num_rows:
            raise BadCheckpoint(
                f"blk.0.indexer.{name}.weight has {found_rows} rows; its metadata says {num_rows}"
            )
    return {}


def _gguf_sharing(keys: gguf.ArchitectureKeys, found: gguf.Found) -> JsonObject:
    """Which layers of GLM-5 choose. Files of before this was written have a choice in each layer,
    or, with longer contexts, in the first two and in every fourth from the third on."""
    is_full = keys.flags("attention.indexer.types")
    if not is_full:
        shares = found["max_position_embeddings"] >= SHARES_FROM
        num_layers = len(keys.layers_with("attn_norm.weight"))
        is_full = [not shares or layer < 2 or layer % 4 == 2 for layer in range(num_layers)]
    if all(is_full):
        _gguf_sizes(keys, found)
    return {"indexer_types": ["full" if one else "shared" for one in is_full]}


_INDEXER = {
    "index_n_heads": gguf.GgufKey("attention.indexer.head_count", int),
    "index_head_dim": gguf.GgufKey("attention.indexer.key_length", int),
    TOPK: gguf.GgufKey("attention.indexer.top_k", int),
}
_gguf_deepseek32 = gguf.experts(gguf.SIGMOID, _INDEXER, _gguf_sizes, _gguf_latents)
_gguf_glm = gguf.experts(gguf.SIGMOID, _INDEXER, _gguf_latents, gguf.groups, _gguf_sharing)
_GGUF = gguf.Architecture(
    more=_gguf_deepseek32,
    reads=gguf.EXPERTS,
    parts={
        **GGUF_PARTS,
        "indexer.attn_q_b": "self_attn.indexer.wq_b",
        "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.k_norm": "self_attn.indexer.k_norm",
        "indexer.proj": "self_attn.indexer.weights_proj",
    },
    joined=GGUF_JOINED,
    is_latent=True,
)
_DEFAULTS = {
    TOPK: 2_048,
    "index_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
FAMILIES = {
    "DeepseekV32": Family(
        read=partial(_sparse, side_by_side=False),
        defaults={**_DEFAULTS, "index_n_heads": 64, "n_group": 8, "topk_group": 4},
        implied=_context,
        gguf={"deepseek32": _GGUF},
    ),
    "GlmMoeDsa": Family(
        read=partial(_sparse, side_by_side=True),
        defaults={**_DEFAULTS, "index_n_heads": 32},
        implied=_context,
        gguf={"glm-dsa": replace(_GGUF, more=_gguf_glm)},
    ),
}
