"""LG's EXAONE. EXAONE 3 is Llama with its own names; EXAONE 4 has norms after each part; K-EXAONE
has experts, and norms before each part."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import count, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    NormPosition,
    QkNorm,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import sigmoid_experts, sparse_layers, with_experts
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    every,
    layer_types,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.config.model_errors import BadConfig
from weft.config.numbers import shown
from weft.json_types import JsonObject


def _exaone3(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(rope=read_rope(config)),
        mlp=MlpSpec(activation=activation(config, key="activation_function")),
    )
    names = TensorNames(
        attention="attn.attention",
        out="out_proj",
        gate_up=("c_fc_0", "c_fc_1"),
        down="c_proj",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        norm="transformer.ln_f",
        embedding="transformer.wte",
        layers="transformer.h",
    )
    return DecoderSpec(layers=(layer,), names=names)


def _exaone4(config: Config) -> DecoderSpec:
    """EXAONE 4. If some layers have a window, only those rotate."""
    full = LayerSpec(
        attention=AttentionSpec(rope=read_rope(config), qk_norm=QkNorm.HEAD),
        mlp=MlpSpec(activation=activation(config)),
        norms=NormPosition.POST,
    )
    width = window(config)
    if not width:
        return DecoderSpec(layers=(full,))
    sliding = replace(full, attention=replace(full.attention, window=width))
    unrotated = replace(full, attention=replace(full.attention, rope=None))
    pattern = config.get("sliding_window_pattern")
    period = 4
    if isinstance(pattern, str):
        period = len(pattern)
    elif isinstance(pattern, int):
        period = pattern
    if period < 1:
        raise BadConfig(f"sliding_window_pattern is {shown(pattern)}; it must be at least 1")
    layers = [unrotated if kind == FULL else sliding for kind in layer_types(config, every(period))]
    return DecoderSpec(layers=tuple(layers))


def _exaone_moe(config: Config) -> DecoderSpec:
    spec = _exaone4(config)
    layers = tuple(replace(layer, norms=NormPosition.PRE) for layer in spec.layers)
    counts = {
        "n_routed_experts": size(config, "num_experts"),
        "n_shared_experts": count(config, "num_shared_experts"),
    }
    names = ExpertNames(choice_bias="e_score_correction_bias")
    return with_experts(
        config,
        replace(spec, layers=layers, names=TensorNames(experts=names)),
        sigmoid_experts({**config, **counts}),
        sparse_layers(config, count(config, "first_k_dense_replace", 1)),
    )


# GGUF files


def _gguf_exaone4(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """EXAONE 4. Files of the first release's model with 64 layers do not contain its windows."""
    of_32b = found["num_hidden_layers"] == 64
    window = keys.number("attention.sliding_window", int, 4_096 if of_32b else 0)
    more: JsonObject = {"sliding_window": window}
    kinds = gguf.by_windows(keys)
    if window and kinds:
        more["layer_types"] = kinds
    return more


_gguf_exaone_moe = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.COUNTS,
        "moe_intermediate_size": gguf.SIZE,
        "num_shared_experts": gguf.GgufKey("expert_shared_count", int, 0),
        "first_k_dense_replace": gguf.GgufKey("leading_dense_block_count", int, 0),
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, False),
        "n_group": gguf.GgufKey("expert_group_count", int, 1),
        "topk_group": gguf.GgufKey("expert_group_used_count", int, 1),
    },
    gguf.scaled,
    _gguf_exaone4,
)


FAMILIES = {
    "Exaone": Family(
        read=_exaone3,
        aliases={"num_hidden_layers": "num_layers"},
        norm_eps_key="layer_norm_epsilon",
    ),
    "Exaone4": Family(
        read=_exaone4,
        gguf={"exaone4": gguf.Architecture(more=_gguf_exaone4, parts=gguf.NORMS_AFTER)},
    ),
    "ExaoneMoe": Family(
        read=_exaone_moe,
        gguf={
            "exaone-moe": gguf.Architecture(
                more=_gguf_exaone_moe,
                reads=gguf.EXPERTS,
                parts={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
            )
        },
        defaults={
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 4_096,
        },
    ),
}
