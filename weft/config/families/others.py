"""Makers of one family each: Hugging Face (SmolLM3), BigCode (StarCoder 2), ByteDance (Seed-OSS),
Baidu (ERNIE 4.5), rednote (dots), Arcee, NVIDIA (Nemotron), Kyutai (Helium), Stability (StableLM),
Tencent (Hunyuan), Shanghai AI Laboratory (InternLM 3), OpenBMB (MiniCPM), MiniMax (M2), JetBrains
(Mellum 2), Upstage (Solar Open)."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.config_json import get, number, require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormKind,
    NormPlace,
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
    SLIDING,
    Config,
    Family,
    activation,
    flag,
    layer_types,
    scale,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.meta import read_llama
from weft.config.families.rope import read_rope, rope_by_type
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


def _starcoder2(config: Config) -> DecoderSpec:
    bias = flag(config, "use_bias", True)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            window=window(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("gelu_pytorch_tanh",)),
            is_gated=False,
            bias=bias,
        ),
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER_BIAS,
        names=TensorNames(gate_up=("c_fc",), down="c_proj"),
    )


def _seed_oss(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=flag(config, "attention_bias", True),
            out_bias=flag(config, "attention_out_bias"),
        ),
        mlp=MlpSpec(activation=activation(config), bias=flag(config, "mlp_bias")),
    )
    return DecoderSpec(layers=(layer,))


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
        shared_size=inner * get(config, "moe_num_shared_experts", int, 0),
    )
    names = ExpertNames(
        choice_bias="moe_statics.e_score_correction_bias",
        choice_bias_has_row=True,
    )

    def has_experts(layer: int) -> bool:
        return first <= layer <= last and (layer + 1) % interval == 0

    spec = with_experts(config, _ernie(config), experts, has_experts)
    return replace(spec, names=TensorNames(experts=names))


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
            qk_norm=QkNorm.WHOLE,
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


def _helium(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=100_000.0, side_by_side=True),
            qkv_bias=flag(config, "attention_bias"),
        ),
        mlp=MlpSpec(activation=activation(config), bias=flag(config, "mlp_bias")),
    )
    return DecoderSpec(layers=(layer,))


def _arcee(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("relu2",)),
            is_gated=False,
            bias=flag(config, "mlp_bias"),
        ),
    )
    return DecoderSpec(layers=(layer,), names=TensorNames(gate_up=("up_proj",)))


def _stablelm(config: Config) -> DecoderSpec:
    require(config, "qk_layernorm", False)
    is_parallel = flag(config, "use_parallel_residual")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=flag(config, "use_qkv_bias"),
        ),
        mlp=MlpSpec(activation=activation(config)),
        norms=NormPlace.PARALLEL if is_parallel else NormPlace.PRE,
    )
    return DecoderSpec(layers=(layer,), norm=NormKind.LAYER_BIAS)


def _nemotron(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("relu2",)),
            is_gated=False,
            bias=flag(config, "mlp_bias"),
        ),
    )
    norm = NormKind.LAYER_PLUS_ONE_BIAS
    if flag(config, "norm_weights_are_whole"):  # only in weft's own config.json (`config/gguf.py`)
        norm = NormKind.LAYER_BIAS
    return DecoderSpec(
        layers=(layer,),
        norm=norm,
        names=TensorNames(gate_up=("up_proj",)),
    )


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
    heads = size(config, "num_attention_heads")
    head_dim = size(config, "head_dim", size(config, "hidden_size") // heads)
    values = {**get(config, "rope_scaling", dict, {}), **get(config, "rope_parameters", dict, {})}
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


# GGUF files


def _gguf_starcoder2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    window = keys.number("attention.sliding_window", int, 0)
    return {**gguf.biases(keys, found), "sliding_window": window}


def _gguf_stablelm(keys: ArchitectureKeys, found: Found) -> JsonObject:
    is_parallel = keys.number("use_parallel_residual", bool, False)
    return {**gguf.biases(keys, found), "use_parallel_residual": is_parallel}


def _gguf_nemotron(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True, "hidden_act": "relu2"}


_gguf_minimax_m2 = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.CHOSEN,
        "num_local_experts": gguf.GgufKey("expert_count", int),
        "intermediate_size": gguf.SIZE,
    },
)

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
    "InternLM3": Family(read=_internlm3),
    "MiniCPM": Family(read=_minicpm),
    "SmolLM3": Family(
        read=_smollm3,
        defaults={"tie_word_embeddings": True},
        gguf={"smollm3": gguf.Architecture(has_pairs=True)},
    ),
    "Starcoder2": Family(
        read=_starcoder2,
        defaults={"tie_word_embeddings": True},
        norm_eps_key="norm_epsilon",
        gguf={
            "starcoder2": gguf.Architecture(
                more=_gguf_starcoder2,
                norm_eps=gguf.LAYER_NORM_EPS,
                has_gate=False,
                parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            )
        },
    ),
    "SeedOss": Family(
        read=_seed_oss,
        defaults={"head_dim": 128},
        gguf={"seed_oss": gguf.Architecture(parts=gguf.MLP_NORM)},
    ),
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
    "Helium": Family(read=_helium, defaults={"head_dim": 128}),
    "Arcee": Family(read=_arcee, gguf={"arcee": gguf.Architecture(has_pairs=True, has_gate=False)}),
    "Nemotron": Family(
        read=_nemotron,
        defaults={"partial_rotary_factor": 0.5},
        norm_eps_key="norm_eps",
        gguf={
            "nemotron": gguf.Architecture(
                more=_gguf_nemotron, norm_eps=gguf.LAYER_NORM_EPS, has_gate=False, is_partial=True
            )
        },
    ),
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
}
