"""Families of several makers with experts: rednote (dots), MiniMax (M2), JetBrains (Mellum 2),
Upstage (Solar Open)."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import (
    checked,
    sigmoid_experts,
    softmax_experts,
    sparse_layers,
    with_experts,
)
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    flag,
    layer_types,
    window,
)
from weft.config.families.rope import read_rope, rope_by_type


def _dots1(config: Config) -> DecoderSpec:
    plain = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qk_norm=QkNorm.HEAD,
            qkv_bias=flag(config, "attention_bias"),
            out_bias=flag(config, "attention_bias"),
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    num_plain = get(config, "first_k_dense_replace", int, 0)
    types = layer_types(config, lambda _: FULL)
    layers = []
    for kind in types:
        attention = replace(plain.attention, window=window(config, kind))
        layers.append(replace(plain, attention=attention))
    return with_experts(
        config,
        DecoderSpec(layers=tuple(layers)),
        sigmoid_experts(config),
        lambda layer: layer >= num_plain,
    )


def _minimax_m2(config: Config) -> DecoderSpec:
    """MiniMax M2. Norms are over all queries and over all keys; released files have the rotated
    part of a head in `rotary_dim`."""
    head_dim = size(config, "head_dim")
    rotation = {"partial_rotary_factor": get(config, "rotary_dim", int, head_dim) / head_dim}
    router = RouterSpec(
        num_experts=size(config, "num_local_experts"),
        num_chosen=size(config, "num_experts_per_tok"),
        scores="sigmoid",
        is_normed=True,
        choice_bias=True,
    )
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope({**rotation, **config}, theta=5_000_000.0, is_partial=True),
            qk_norm=QkNorm.ALL_HEADS,
        ),
        mlp=MoeSpec(
            router=checked(router),
            size=size(config, "intermediate_size"),
            activation=activation(config),
        ),
    )
    names = TensorNames(
        mlp="block_sparse_moe",
        experts=ExpertNames(
            choice_bias="e_score_correction_bias",
            gate_up=("w1", "w3"),
            down="w2",
        ),
    )
    return DecoderSpec(layers=(layer,), names=names)


def _mellum(config: Config) -> DecoderSpec:
    """Mellum 2: Qwen 3 with experts, and a separate rotation for each kind of layers."""
    experts = softmax_experts(config, is_normed=flag(config, "norm_topk_prob", True))
    bias = flag(config, "attention_bias")
    layers = []
    for kind in layer_types(config, lambda _: FULL):
        attention = AttentionSpec(
            rope=rope_by_type(config, kind, 500_000.0 if kind == FULL else 10_000.0),
            window=window(config, kind),
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            out_bias=bias,
        )
        layers.append(LayerSpec(attention=attention, mlp=MlpSpec(activation=activation(config))))
    spec = DecoderSpec(layers=tuple(layers))
    return with_experts(config, spec, experts, sparse_layers(config, 0))


def _solar_open(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=1_000_000.0, is_partial=True),
            qkv_bias=flag(config, "attention_bias"),
        ),
        mlp=sigmoid_experts(config),
    )
    return DecoderSpec(layers=(layer,))


_gguf_minimax_m2 = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.CHOSEN,
        "num_local_experts": gguf.GgufKey("expert_count", int),
        "intermediate_size": gguf.SIZE,
    },
)


FAMILIES = {
    "Dots1": Family(
        read=_dots1,
        gguf={"dots1": gguf.Architecture(more=gguf.sigmoid_experts, reads=gguf.EXPERTS)},
    ),
    "MiniMaxM2": Family(
        read=_minimax_m2,
        defaults={"head_dim": 128},
        gguf={
            "minimax-m2": gguf.Architecture(
                more=_gguf_minimax_m2,
                reads=gguf.EXPERTS,
                is_partial=True,
                parts={
                    **gguf.MIXTRAL_NAMES,
                    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
                },
            )
        },
    ),
    "Mellum": Family(
        read=_mellum,
        defaults={
            "head_dim": 128,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "sliding_window": 1_024,
        },
    ),
    "SolarOpen": Family(
        read=_solar_open,
        aliases={"intermediate_size": "moe_intermediate_size"},
        defaults={
            "head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
}
