"""Gemma: norms times (1 + weight), embeddings times the square root of their size, gates by gelu.

Gemma 2 caps the scores of attention; VaultGemma is Gemma 2 without the norms after its parts.
Gemma 3n and 4 have weights of norms without the 1, and further mechanisms: `gemma3n.py`,
`gemma4.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.config_json import number, require, rope_theta, section, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    QkNorm,
    RopeConfig,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import (
    SLIDING,
    Config,
    Family,
    activation,
    every,
    flag,
    layer_types,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope, rope_by_type, rope_of
from weft.config.vision import pictures
from weft.json_types import JsonObject

GELU = "gelu_pytorch_tanh"


def _norm(config: Config) -> NormKind:
    # This key is only in weft's own config.json (GGUF files, below).
    if flag(config, "norm_weights_are_whole"):
        return NormKind.RMS_EXACT
    return NormKind.RMS_PLUS_ONE


def _gemma(config: Config) -> DecoderSpec:
    # The first releases have "gelu" here, but mean the other gelu.
    activation(config, (GELU, "gelu"))
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=GELU),
    )
    return DecoderSpec(
        layers=(layer,),
        norm=_norm(config),
        embedding_scale=math.sqrt(size(config, "hidden_size")),
    )


def _gemma2(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    full = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            scale=number(config, "query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
            score_cap=number(config, "attn_logit_softcapping", 0.0, low=0.0),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config, (GELU,), "hidden_activation")),
        norms=NormPosition.BOTH,
    )
    sliding = replace(full, attention=replace(full.attention, window=window(config)))
    kinds = layer_types(config, every(2))
    return _with_two_norms(config, tuple(sliding if kind == SLIDING else full for kind in kinds))


def _vaultgemma(config: Config) -> DecoderSpec:
    spec = _gemma2(config)
    layers = tuple(replace(layer, norms=NormPosition.PRE) for layer in spec.layers)
    return replace(spec, layers=layers)


def _gemma3(config: Config) -> DecoderSpec:
    require(config, "attn_logit_softcapping", 0)
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            scale=number(config, "query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config, (GELU,), "hidden_activation")),
        norms=NormPosition.BOTH,
    )

    def of(kind: str) -> LayerSpec:
        attention = replace(
            layer.attention,
            window=window(config, kind),
            rope=_gemma3_rope(config, kind),
        )
        return replace(layer, attention=attention)

    kinds = layer_types(config, every(size(config, "sliding_window_pattern", 6)))
    return _with_two_norms(config, tuple(map(of, kinds)))


def _with_two_norms(config: Config, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    """Gemma 2 and 3: a norm before and after each part of a layer, and a cap of logits."""
    return DecoderSpec(
        layers=layers,
        norm=_norm(config),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
        embedding_scale=math.sqrt(size(config, "hidden_size")),
        logit_cap=number(config, "final_logit_softcapping", 0.0, low=0.0),
    )


def _gemma3_rope(config: Config, kind: str) -> RopeConfig:
    """The rotation of one kind of layers. Layers that see all tokens have longer wavelengths than
    layers with a window. Older files have a scaling only for the former."""
    if "rope_parameters" in config:
        return rope_by_type(config, kind, 10_000.0 if kind == SLIDING else 1e6)
    if kind == SLIDING:
        theta = rope_theta(config, key="rope_local_base_freq")
        return rope_of(config, {}, theta=theta)
    scaling = section(config, "rope_scaling")
    return rope_of(config, scaling, theta=rope_theta(config, 1e6))


# GGUF files


def _gguf_gemma(keys: ArchitectureKeys, found: Found) -> JsonObject:
    # Converters have added 1 to the weights of norms.
    return {"norm_weights_are_whole": True}


def _gguf_gemma2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {
        **_gguf_gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 30.0),
        "sliding_window": keys.number("attention.sliding_window", int, 4_096),
    }


def _gguf_gemma3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    rope = dict(found["rope_parameters"])
    rope["rope_theta"] = keys.number("rope.freq_base", float, 1_000_000.0)
    near = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", float, 10_000.0),
    }
    return {
        **_gguf_gemma(keys, found),
        "query_pre_attn_scalar": _query_scalar(found, largest=62),
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 0.0),
        "sliding_window": keys.number("attention.sliding_window", int, 1_024),
        "sliding_window_pattern": keys.number("attention.sliding_window_pattern", int, 6),
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }


def _query_scalar(found: Found, largest: int) -> int:
    """The scale of queries, which files do not contain. The largest model of a release (27B), with
    `largest` layers, scales scores by hidden size / number of heads; the other models by the size
    of a head."""
    if found["num_hidden_layers"] == largest:
        return int(found["hidden_size"] // found["num_attention_heads"])
    return int(found["head_dim"])


_GGUF_NORMS = {**gguf.NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}


_GEMMA3 = Family(
    read=_gemma3,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 4_096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
_GEMMA2_DEFAULTS = {"head_dim": 256, "sliding_window": 4_096, "tie_word_embeddings": True}
FAMILIES = {
    "Gemma": Family(
        read=_gemma,
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        gguf={"gemma": gguf.Architecture(more=_gguf_gemma)},
    ),
    "Gemma2": Family(
        read=_gemma2,
        defaults=_GEMMA2_DEFAULTS,
        gguf={
            "gemma2": gguf.Architecture(
                more=_gguf_gemma2,
                reads=("attn_logit_softcapping", "final_logit_softcapping"),
                parts=_GGUF_NORMS,
            )
        },
    ),
    "VaultGemma": Family(read=_vaultgemma, defaults=_GEMMA2_DEFAULTS),
}
ARCHITECTURES = {
    "Gemma3ForCausalLM": replace(
        _GEMMA3,
        gguf={
            "gemma3": gguf.Architecture(
                more=_gguf_gemma3, reads=("final_logit_softcapping",), parts=_GGUF_NORMS
            )
        },
    ),
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, tower=pictures.gemma3),
    "Gemma3TextModel": replace(_GEMMA3, task="embed"),
}
