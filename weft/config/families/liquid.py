"""Liquid AI: LFM2, which has short convolutions, and attention in a few layers."""

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
    StateNames,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import checked, with_experts
from weft.config.families.family import FULL, Config, Family, flag, scale
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.config.families.states import CONV, read_short_conv, with_states
from weft.json_types import JsonObject

_NAMES = TensorNames(
    out="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    norm="model.embedding_norm",
    state=StateNames(mixer="conv", inputs=("in_proj",), conv="conv"),
    experts=ExpertNames(
        choice_bias="expert_bias",
        gate_up=("w1", "w3"),
        down="w2",
    ),
)


def _lfm2(config: Config) -> DecoderSpec:
    return _layers(config, MlpSpec(size=_inner_size(config)))


def _layers(config: Config, mlp: MlpSpec) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=1_000_000.0),
            qk_norm=QkNorm.HEAD,
        ),
        mlp=mlp,
    )
    with_attention = get(config, "full_attn_idxs", list, [])

    def kind_of(index: int) -> str:
        return FULL if index in with_attention else CONV

    spec = DecoderSpec(layers=(layer,), names=_NAMES)
    return with_states(config, spec, read_short_conv(config), CONV, kind_of)


def _inner_size(config: Config) -> int:
    """The inner size: two thirds of the file's size, times a factor, rounded up to a multiple; the
    file's size itself if `block_auto_adjust_ff_dim` is false."""
    inner = size(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    inner = int(scale(config, "block_ffn_dim_multiplier") * int(2 * inner / 3))
    step = size(config, "block_multiple_of", 256)
    return -(-inner // step) * step


def _lfm2_moe(config: Config) -> DecoderSpec:
    """LFM2 with experts in all layers after the first `num_dense_layers`."""
    num_plain = get(config, "num_dense_layers", int, 2)
    router = RouterSpec(
        num_experts=size(config, "num_experts"),
        num_chosen=size(config, "num_experts_per_tok"),
        scores="sigmoid",
        is_normed=flag(config, "norm_topk_prob", True),
        scale=scale(config, "routed_scaling_factor"),
        choice_bias=flag(config, "use_expert_bias", True),
    )
    experts = MoeSpec(router=checked(router), size=size(config, "moe_intermediate_size"))
    spec = _layers(config, MlpSpec())
    return with_experts(config, spec, experts, lambda layer: layer >= num_plain)


# GGUF files


def _gguf_lfm2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Files have the final size of the feed-forward part.
    wanted = {"conv_L_cache": gguf.GgufKey("shortconv.l_cache", int)}
    return {**gguf.said(keys, found, wanted), "block_auto_adjust_ff_dim": False}


def _choice_bias(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"use_expert_bias": keys.has("exp_probs_b.bias")}


_gguf_lfm2_moe = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.COUNTS,
        "moe_intermediate_size": gguf.SIZE,
        "num_dense_layers": gguf.GgufKey("leading_dense_block_count", int, 0),
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, True),
    },
    _gguf_lfm2,
    _choice_bias,
    gguf.scaled,
)

_GGUF_NAMES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}

_GGUF_OUTSIDE = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}

_GGUF_CONVS = ("shortconv.conv.weight",)

_GGUF_STATES = gguf.StateLayers(
    tensor="shortconv.conv.weight",
    kind="conv",
    inputs=("shortconv.in_proj.weight", lambda config: 3 * int(config["hidden_size"])),
)


_FAMILY = Family(
    read=_lfm2,
    defaults={"tie_word_embeddings": True},
    aliases={"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
    norm_eps_key="norm_eps",
)
FAMILIES = {
    "Lfm2": replace(
        _FAMILY,
        gguf={
            "lfm2": gguf.Architecture(
                more=_gguf_lfm2,
                parts=_GGUF_NAMES,
                outside=_GGUF_OUTSIDE,
                convs=_GGUF_CONVS,
                states=_GGUF_STATES,
            )
        },
    ),
    "Lfm2Moe": replace(
        _FAMILY,
        read=_lfm2_moe,
        gguf={
            "lfm2moe": gguf.Architecture(
                more=_gguf_lfm2_moe,
                reads=gguf.EXPERTS,
                parts={
                    **_GGUF_NAMES,
                    "ffn_gate_inp": "feed_forward.gate",
                    "ffn_gate_exps": "feed_forward.experts.w1",
                    "ffn_up_exps": "feed_forward.experts.w3",
                    "ffn_down_exps": "feed_forward.experts.w2",
                    "exp_probs_b.bias": "feed_forward.expert_bias",
                },
                outside=_GGUF_OUTSIDE,
                convs=_GGUF_CONVS,
                states=_GGUF_STATES,
            )
        },
    ),
}
