"""DeepSeek V3.2 and GLM-5: DeepSeek V3, whose queries attend to the `index_topk` tokens that an
indexer chooses for them. In contexts of at most as many tokens every token is chosen. Contexts end
there, so the indexer is not computed. Source: arXiv:2512.02556."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import size
from weft.config.decoder import DecoderSpec
from weft.config.families.deepseek import read_deepseek3
from weft.config.families.family import Config, Family
from weft.json_types import JsonMapping

TOPK = "index_topk"


def _sparse(config: Config) -> DecoderSpec:
    spec = read_deepseek3(config)
    return replace(spec, names=replace(spec.names, unread=("self_attn.indexer.",)))


def _context(config: Config) -> JsonMapping:
    """Contexts in which every token is chosen."""
    longest = min(size(config, "max_position_embeddings"), size(config, TOPK))
    return {"max_position_embeddings": longest}


_DEFAULTS = {
    TOPK: 2_048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
FAMILIES = {
    "DeepseekV32": Family(
        read=_sparse, defaults={**_DEFAULTS, "n_group": 8, "topk_group": 4}, implied=_context
    ),
    "GlmMoeDsa": Family(read=_sparse, defaults=_DEFAULTS, implied=_context),
}
