"""Gemma 4: layers that see all tokens have larger heads, and rotate a part of them.

The sizes of the release differ in mechanisms. The small ones have inputs for each layer, and their
last layers read the K and V of earlier ones; the large ones take values from keys in layers that
see all tokens; one has experts beside its dense parts. The encoders of pictures and sounds are not
implemented: the text part of such a model is served.
"""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.config_json import get, number, require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerInputSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormPlace,
    QkNorm,
    RopeConfig,
    RouterSpec,
    TensorNames,
)
from weft.config.families.experts import checked
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    every,
    flag,
    layer_types,
    window,
)
from weft.config.families.rope import proportional, rope_of
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping

GELU = "gelu_pytorch_tanh"
FULL_THETA = 1e6
FULL_SHARE = 0.25  # of the pairs of a head that turn, in layers that see all tokens
SLIDING_THETA = 10_000.0


def _gemma4(config: Config) -> DecoderSpec:
    require(config, "attn_logit_softcapping", 0)
    kinds = layer_types(config, every(6))
    kinds[-1] = FULL  # whatever a file says
    owners = _owners(config, kinds)
    return DecoderSpec(
        layers=tuple(
            _layer(config, index, kind, owner)
            for index, (kind, owner) in enumerate(zip(kinds, owners, strict=True))
        ),
        names=TensorNames(
            mlp_norm="pre_feedforward_layernorm",
            experts=ExpertNames(router="router.proj"),
        ),
        embedding_scale=math.sqrt(size(config, "hidden_size")),
        layer_inputs=_layer_inputs(config),
        logit_cap=number(config, "final_logit_softcapping", 0.0, low=0.0),
    )


def _layer(config: Config, index: int, kind: str, owner: int | None) -> LayerSpec:
    bias = flag(config, "attention_bias")
    kv_heads, head_dim = _heads(config, index, kind)
    attention = AttentionSpec(
        window=window(config, kind),
        rope=_rope(config, kind),
        scale=1.0,
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_of=owner,
        norms_values=True,
    )
    if owner is None and kind == FULL:
        attention = replace(attention, values_are_keys=flag(config, "attention_k_eq_v"))
    return LayerSpec(
        attention=attention,
        mlp=_feed_forward(config, owner),
        norms=NormPlace.BOTH,
        # This key is only in weft's own config.json (`config/gguf_readers.py`).
        has_factor=flag(config, "layers_have_scalars", True),
    )


def _heads(config: Config, index: int, kind: str) -> tuple[int, int]:
    """The number of KV heads and the size of a head in a layer, 0 for those of the model."""
    by_layer = get(config, "per_layer_config", dict, {})
    if by_layer:
        of_layer = _of_layer(by_layer, index)
        kv_heads = get(of_layer, "num_key_value_heads", int, 0)
        head_dim = get(of_layer, "head_dim", int, 0)
    elif kind == FULL:
        kv_heads = 0
        if flag(config, "attention_k_eq_v"):
            kv_heads = get(config, "num_global_key_value_heads", int, 0)
        head_dim = get(config, "global_head_dim", int, 512)
    else:
        return 0, 0
    # 0 if it is that of the model: equal layers have equal descriptions.
    if head_dim == size(config, "head_dim"):
        head_dim = 0
    if kv_heads == size(config, "num_key_value_heads"):
        kv_heads = 0
    num_heads = size(config, "num_attention_heads")
    if head_dim < 0 or head_dim % 2:
        raise UnsupportedModel(f"layer {index} has heads of {head_dim}: their size must be even")
    if kv_heads < 0 or (kv_heads and num_heads % kv_heads):
        raise UnsupportedModel(
            f"layer {index} has {num_heads} heads with {kv_heads} KV heads: the heads must be a "
            "multiple of the KV heads"
        )
    return kv_heads, head_dim


def _of_layer(by_layer: JsonMapping, index: int) -> JsonMapping:
    """The sizes of a layer in a newer file, which has those of layers that differ."""
    for key in by_layer:
        if not key.isdecimal():
            raise UnsupportedModel(
                f"per_layer_config has {key[:64]!r}; its keys must be numbers of layers"
            )
        if int(key) == index:  # numbers may begin with zeros
            return get(by_layer, key, dict)
    return {}


def _owners(config: Config, kinds: list[str]) -> list[int | None]:
    """The layer whose K and V each layer reads: for the last layers, the last of the others that
    sees as many tokens; None: its own."""
    num_shared = get(config, "num_kv_shared_layers", int, 0)
    first_shared = len(kinds) - num_shared
    if not 0 < first_shared <= len(kinds):
        raise UnsupportedModel(
            f"num_kv_shared_layers is {num_shared}; it must be 0 to {len(kinds) - 1}"
        )
    own = kinds[:first_shared]
    found: list[int | None] = [None] * first_shared
    for kind in kinds[first_shared:]:
        if kind not in own:
            raise UnsupportedModel(
                f"num_kv_shared_layers is {num_shared}, but no layer before those is {kind}"
            )
        found.append(first_shared - 1 - own[::-1].index(kind))
    return found


def _rope(config: Config, kind: str) -> RopeConfig:
    values = get(get(config, "rope_parameters", dict, {}), kind, dict, {})
    if kind != FULL:
        return rope_of(config, values, theta=SLIDING_THETA)
    kind_of_rope = get(values, "rope_type", str, "proportional")
    if kind_of_rope == "proportional":
        return proportional(values, theta=FULL_THETA, share=FULL_SHARE)
    return rope_of(config, values, theta=FULL_THETA)


def _feed_forward(config: Config, owner: int | None) -> MlpSpec | MoeSpec:
    gelu = activation(config, (GELU,), "hidden_activation")
    inner = size(config, "intermediate_size")
    if owner is not None and flag(config, "use_double_wide_mlp"):
        inner *= 2
    if not flag(config, "enable_moe_block"):
        return MlpSpec(size=inner, activation=gelu)
    return MoeSpec(
        router=checked(
            RouterSpec(
                num_experts=size(config, "num_experts"),
                num_chosen=size(config, "top_k_experts"),
                is_normed=True,
                expert_scale=True,
            )
        ),
        size=size(config, "moe_intermediate_size"),
        activation=gelu,
        dense_size=inner,
    )


def _layer_inputs(config: Config) -> LayerInputSpec | None:
    inner = get(config, "hidden_size_per_layer_input", int, 0)
    if inner <= 0:
        return None
    vocab_size = size(config, "vocab_size")
    num_rows = size(config, "vocab_size_per_layer_input", vocab_size)
    if num_rows != vocab_size:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {num_rows:,}; only the vocab_size ({vocab_size:,}) is "
            "supported"
        )
    return LayerInputSpec(
        size=inner,
        activation=activation(config, (GELU,), "hidden_activation"),
        unknown_token=max(get(config, "pad_token_id", int, 0), 0),
    )


_GEMMA4 = Family(
    read=_gemma4,
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
# The same text model without inputs for each layer, whose pictures and sounds have no encoder.
_UNIFIED = replace(
    _GEMMA4,
    defaults={
        **_GEMMA4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1_024,
        "hidden_size_per_layer_input": 0,
    },
)
ARCHITECTURES = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4TextModel": replace(_GEMMA4, task="embed"),
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": _UNIFIED,
    "Gemma4UnifiedTextModel": replace(_UNIFIED, task="embed"),
}
