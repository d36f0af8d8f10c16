"""Baidu: ERNIE 4.5, with and without experts."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import count, get, require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import (
    checked,
    with_experts,
)
from weft.config.families.family import (
    Config,
    Family,
    activation,
    flag,
)
from weft.config.families.rope import read_rope


def _ernie(config: Config) -> DecoderSpec:
    bias = flag(config, "use_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=500_000.0, side_by_side=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config), bias=bias),
    )
    return DecoderSpec(layers=(layer,))


def _ernie_moe(config: Config) -> DecoderSpec:
    """ERNIE 4.5 with experts: every `moe_layer_interval`-th layer from `moe_layer_start_index` to
    `moe_layer_end_index` (-1: the last) has experts."""
    require(config, "use_bias", False)
    first = get(config, "moe_layer_start_index", int, 1)
    last = get(config, "moe_layer_end_index", int, -1)
    interval = size(config, "moe_layer_interval", 1)
    if last < 0:
        last += size(config, "num_hidden_layers")
    inner = size(config, "moe_intermediate_size")
    experts = MoeSpec(
        router=checked(
            RouterSpec(
                num_experts=size(config, "moe_num_experts"),
                num_chosen=size(config, "moe_k"),
                is_normed=True,
                choice_bias=True,
            )
        ),
        size=inner,
        activation=activation(config),
        shared_size=inner * count(config, "moe_num_shared_experts"),
    )
    names = ExpertNames(
        choice_bias="moe_statics.e_score_correction_bias",
        choice_bias_has_row=True,
    )

    def has_experts(layer: int) -> bool:
        return first <= layer <= last and (layer + 1) % interval == 0

    spec = with_experts(config, _ernie(config), experts, has_experts)
    return replace(spec, names=TensorNames(experts=names))


_gguf_ernie_moe = gguf.experts(
    gguf.SOFTMAX,
    {
        "moe_num_experts": gguf.GgufKey("expert_count", int),
        "moe_k": gguf.GgufKey("expert_used_count", int),
        "moe_intermediate_size": gguf.SIZE,
        "moe_num_shared_experts": gguf.GgufKey("expert_shared_count", int, 0),
        "moe_layer_start_index": gguf.GgufKey("leading_dense_block_count", int, 0),
        "moe_layer_interval": gguf.GgufKey("interleave_moe_layer_step", int, 1),
    },
    gguf.biases,
)


FAMILIES = {
    "Ernie4_5": Family(
        read=_ernie,
        defaults={"head_dim": 128, "tie_word_embeddings": True},
        gguf={"ernie4_5": gguf.Architecture(more=gguf.biases)},
    ),
    "Ernie4_5_Moe": Family(
        read=_ernie_moe,
        defaults={
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
        },
        gguf={
            "ernie4_5-moe": gguf.Architecture(
                more=_gguf_ernie_moe,
                reads=gguf.EXPERTS,
                parts={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
                rows=("exp_probs_b.bias",),
            )
        },
    ),
}
