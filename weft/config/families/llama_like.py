"""Families of several makers whose decoder is Llama's with other biases, windows, norms or factors:
Hugging Face (SmolLM3), ByteDance (Seed-OSS), Kyutai (Helium), Stability (StableLM), Shanghai AI
Laboratory (InternLM 3), OpenBMB (MiniCPM), Tencent (Hunyuan)."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.config_json import get, number, require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    QkNorm,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    activation,
    flag,
    head_dim_of,
    layer_types,
    mlp_of,
    scale,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.meta import read_llama
from weft.config.families.rope import read_rope, rope_values
from weft.json_types import JsonObject


def _smollm3(config: Config) -> DecoderSpec:
    """SmolLM3. `no_rope_layers` has a 1 for each layer that rotates, a 0 for each that does not;
    the latter may have a window."""
    num_layers = size(config, "num_hidden_layers")
    rotates = get(config, "no_rope_layers", list, [])
    if not rotates:
        interval = size(config, "no_rope_layer_interval", 4)
        rotates = [(layer + 1) % interval for layer in range(num_layers)]
    has_window = flag(config, "use_sliding_window")

    def kind_of(layer: int) -> str:
        return FULL if rotates[layer] else SLIDING

    like = read_llama(config).layer(0)
    layers = []
    for layer, kind in enumerate(layer_types(config, kind_of)):
        attention = replace(
            like.attention,
            rope=like.attention.rope if rotates[layer] else None,
            window=window(config, kind) if has_window else 0,
        )
        layers.append(replace(like, attention=attention))
    return DecoderSpec(layers=tuple(layers))


def _seed_oss(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=flag(config, "attention_bias", True),
            out_bias=flag(config, "attention_out_bias"),
        ),
        mlp=mlp_of(config),
    )
    return DecoderSpec(layers=(layer,))


def _helium(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=100_000.0, side_by_side=True),
            qkv_bias=flag(config, "attention_bias"),
        ),
        mlp=mlp_of(config),
    )
    return DecoderSpec(layers=(layer,))


def _stablelm(config: Config) -> DecoderSpec:
    require(config, "qk_layernorm", False)
    is_parallel = flag(config, "use_parallel_residual")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=flag(config, "use_qkv_bias"),
        ),
        mlp=MlpSpec(activation=activation(config)),
        norms=NormPosition.PARALLEL if is_parallel else NormPosition.PRE,
    )
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER_BIAS)


def _internlm3(config: Config) -> DecoderSpec:
    """InternLM 3: Llama with two flags for the biases of attention."""
    bias = flag(config, "bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=flag(config, "qkv_bias"),
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config), bias=bias),
    )
    return DecoderSpec(layers=(layer,))


def _minicpm(config: Config) -> DecoderSpec:
    """MiniCPM: Llama with factors that follow from its sizes. Source: arXiv:2404.06395,
    section 3."""
    require(config, "num_experts", 0)
    num_layers = size(config, "num_hidden_layers")
    hidden = size(config, "hidden_size")
    spec = read_llama(config)
    depth = number(config, "scale_depth", 1.0, above=0.0)
    layer = replace(spec.layer(0), residual_scale=depth / math.sqrt(num_layers))
    return replace(
        spec,
        layers=(layer,),
        embedding_scale=scale(config, "scale_emb"),
        logit_scale=size(config, "dim_model_base", hidden) / hidden,
    )


def _hunyuan(config: Config) -> DecoderSpec:
    """Hunyuan: Llama with norms of rotated heads. A fixed "alpha" raises the base of the rotation;
    files call it "dynamic", although it does not depend on the length."""
    head_dim = head_dim_of(config)
    values = rope_values(config)
    alpha = number(values, "alpha", 1.0, above=0.0)
    rope = read_rope(config)
    rope = replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=rope,
            qk_norm=QkNorm.ROTATED_HEAD,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    names = TensorNames(q_norm="query_layernorm", k_norm="key_layernorm")
    return DecoderSpec(layers=(layer,), names=names)


def _gguf_stablelm(keys: ArchitectureKeys, found: Found) -> JsonObject:
    is_parallel = keys.number("use_parallel_residual", bool, False)
    return {**gguf.biases(keys, found), "use_parallel_residual": is_parallel}


FAMILIES = {
    "SmolLM3": Family(
        read=_smollm3,
        defaults={"tie_word_embeddings": True},
        gguf={"smollm3": gguf.Architecture(has_pairs=True)},
    ),
    "SeedOss": Family(
        read=_seed_oss,
        defaults={"head_dim": 128},
        gguf={"seed_oss": gguf.Architecture(parts=gguf.MLP_NORM)},
    ),
    "Helium": Family(read=_helium, defaults={"head_dim": 128}),
    "StableLm": Family(
        read=_stablelm,
        defaults={"partial_rotary_factor": 0.25},
        norm_eps_key="layer_norm_eps",
        gguf={
            "stablelm": gguf.Architecture(
                more=_gguf_stablelm,
                reads=("use_parallel_residual",),
                norm_eps=gguf.LAYER_NORM_EPS,
                is_partial=True,
            )
        },
    ),
    "InternLM3": Family(read=_internlm3),
    "MiniCPM": Family(read=_minicpm),
    "HunYuanDenseV1": Family(
        read=_hunyuan,
        gguf={
            # Files have the base of the rotation after "alpha" is applied.
            "hunyuan-dense": gguf.Architecture(
                parts={
                    "attn_q_norm": "self_attn.query_layernorm",
                    "attn_k_norm": "self_attn.key_layernorm",
                }
            )
        },
    ),
}
