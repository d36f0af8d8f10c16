"""BLOOM and MPT, whose scores fall with distance (ALiBi) and whose tokens have no other positions;
and Falcon, whose tensors are laid out as BLOOM's."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, require, section, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    TensorNames,
)
from weft.config.families.eleuther import NAMES as GPT_NEOX_NAMES
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.rope import read_rope

MOST = 8.0  # the largest exponent of a slope
_NAMES = replace(
    GPT_NEOX_NAMES,
    attention="self_attention",
    norm="transformer.ln_f",
    embedding="transformer.word_embeddings",
    layers="transformer.h",
)


def _bloom(config: Config) -> DecoderSpec:
    require(config, "apply_residual_connection_post_layernorm", False)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=None,
            alibi=MOST,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpSpec(
            size=4 * size(config, "hidden_size"),
            activation="gelu_new",
            is_gated=False,
            bias=True,
        ),
    )
    names = replace(_NAMES, embedding_norm="transformer.word_embeddings_layernorm")
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER_BIAS, names=names)


def _mpt(config: Config) -> DecoderSpec:
    attention = section(config, "attn_config")
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        require(attention, key, False)
    require(attention, "attn_type", "multihead_attention")
    require(attention, "alibi", True)
    require(attention, "clip_qkv", 0)
    require(attention, "alibi_bias_max", MOST)  # the only one that transformers computes
    require(config, "logit_scale", None)
    require(config, "no_bias", True)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=None,
            alibi=MOST,
            scale=get(attention, "softmax_scale", float, 0.0),
        ),
        mlp=MlpSpec(
            size=size(config, "expansion_ratio", 4) * size(config, "hidden_size"),
            activation="gelu",
            is_gated=False,
        ),
    )
    names = TensorNames(
        attention="attn",
        qkv=("Wqkv",),
        out="out_proj",
        mlp="ffn",
        gate_up=("up_proj",),
        down="down_proj",
        attention_norm="norm_1",
        mlp_norm="norm_2",
        norm="transformer.norm_f",
        embedding="transformer.wte",
        layers="transformer.blocks",
    )
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER, names=names)


def _falcon(config: Config) -> DecoderSpec:
    # Its code rounds these biases to bfloat16, in float32 too, so that they depend on more than
    # distances.
    require(config, "alibi", False)
    bias = flag(config, "bias")
    is_new = flag(config, "new_decoder_architecture")
    kv_heads = size(config, "num_attention_heads")
    if is_new:
        kv_heads = size(config, "num_kv_heads", kv_heads)
    elif flag(config, "multi_query", True):
        kv_heads = 1
    norms = NormPosition.PARALLEL
    names = _NAMES
    if is_new and get(config, "num_ln_in_parallel_attn", int, 2) == 2:
        norms = NormPosition.PARALLEL_TWO
        names = replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    elif not is_new and not flag(config, "parallel_attn", True):
        norms = NormPosition.PRE
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            kv_heads=kv_heads,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            size=get(config, "ffn_hidden_size", int, 4 * size(config, "hidden_size")),
            activation=activation(config, ("gelu",), "activation"),
            is_gated=False,
            bias=bias,
        ),
        norms=norms,
    )
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER_BIAS, names=names)


_COMMON = {
    "hidden_size": "n_embed",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_MPT = Family(
    read=_mpt,
    norm_eps_key="layer_norm_epsilon",
    aliases={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "intermediate_size": 1,
    },
)
FAMILIES = {
    "Bloom": Family(
        read=_bloom,
        norm_eps_key="layer_norm_epsilon",
        aliases={**_COMMON, "max_position_embeddings": "seq_length"},
        defaults={
            "max_position_embeddings": 2_048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "intermediate_size": 1,
        },
    ),
    "MPT": _MPT,  # the name of its published code
    "Mpt": _MPT,
    "Falcon": Family(
        read=_falcon,
        norm_eps_key="layer_norm_epsilon",
        aliases={**_COMMON},
        defaults={
            "max_position_embeddings": 2_048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "intermediate_size": 1,
        },
    ),
}
