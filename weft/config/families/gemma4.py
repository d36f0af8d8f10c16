"""Gemma 4: layers that see all tokens have larger heads, and rotate a part of them.

The sizes of the release differ in mechanisms. The small ones have inputs for each layer, and their
last layers read the K and V of earlier ones; the large ones take values from keys in layers that
see all tokens; one has experts beside its dense parts. In the large ones, tokens of a picture see
each other both ways in layers with windows. The small ones hear, too, and so does the unified form,
which has products instead of encoders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.config.config_json import MAX_SIZE, count, get, number, require, section, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerInputSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormPosition,
    QkNorm,
    RopeConfig,
    RouterSpec,
    TensorNames,
)
from weft.config.families import gguf
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
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import proportional, rope_of
from weft.config.model_errors import BadCheckpoint, BadConfig, UnsupportedModel
from weft.config.numbers import shown
from weft.config.vision.gemma4_sound import gemma4_towers
from weft.config.vision.gemma4_unified import gemma4_unified
from weft.json_types import JsonMapping, JsonObject

GELU = "gelu_pytorch_tanh"
FULL_THETA = 1e6
FULL_SHARE = 0.25  # of the pairs of a head that turn, in layers that see all tokens
SLIDING_THETA = 10_000.0


def _gemma4(config: Config) -> DecoderSpec:
    require(config, "attn_logit_softcapping", 0)
    kinds = layer_types(config, every(6))
    kinds[-1] = FULL  # whatever a file says
    owners = kv_owners(config, kinds)
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
        sees_later=kind != FULL,
    )
    if owner is None and kind == FULL:
        attention = replace(attention, values_are_keys=flag(config, "attention_k_eq_v"))
    return LayerSpec(
        attention=attention,
        mlp=_feed_forward(config, owner),
        norms=NormPosition.BOTH,
        # This key is only in weft's own config.json (GGUF files, below).
        has_factor=flag(config, "layers_have_scalars", True),
    )


def _heads(config: Config, index: int, kind: str) -> tuple[int, int]:
    """The number of KV heads and the size of a head in a layer, 0 for those of the model."""
    by_layer = section(config, "per_layer_config")
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


def kv_owners(config: Config, kinds: list[str]) -> list[int | None]:
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
    values = section(section(config, "rope_parameters"), kind)
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
    inner = count(config, "hidden_size_per_layer_input", most=MAX_SIZE)
    if not inner:
        return None
    vocab_size = size(config, "vocab_size")
    num_rows = size(config, "vocab_size_per_layer_input", vocab_size)
    if num_rows != vocab_size:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {num_rows:,}; only the vocab_size ({vocab_size:,}) is "
            "supported"
        )
    unknown = max(get(config, "pad_token_id", int, 0), 0)
    if unknown >= vocab_size:
        raise BadConfig(
            f"pad_token_id is {shown(unknown)}; 0 to {vocab_size - 1:,} are in the vocabulary"
        )
    return LayerInputSpec(
        size=inner,
        activation=activation(config, (GELU,), "hidden_activation"),
        unknown_token=unknown,
    )


# GGUF files


def _gguf_gemma4(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Gemma 4. The sizes of a head that all architectures have are those of layers that see all
    tokens."""
    has_scalars = keys.has("layer_output_scale.weight")
    head_dim = keys.number("attention.key_length_swa", int, found["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        other = keys.number(key, int, head_dim)
        if other != head_dim:
            raise UnsupportedModel(
                f"{keys.full(key)} is {other}, but heads with windows have {head_dim} values; "
                "other values and partly rotated heads are not supported"
            )
    kinds = gguf.by_windows(keys)
    if not kinds:
        raise BadCheckpoint(f"the file has no {keys.full(gguf.WINDOWS)} in its metadata")
    return {
        **_gguf_heads(keys, found, head_dim, kinds),
        **_gguf_feed_forward(keys, found),
        "layer_types": kinds,
        "sliding_window": keys.number(gguf.WINDOW, int, 512),
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", int, 0),
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", int, 0),
        "layers_have_scalars": has_scalars,
        "final_logit_softcapping": keys.number("final_logit_softcapping", float, 0.0),
        "rope_parameters": {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", float, 10_000.0),
            },
        },
    }


def _gguf_heads(
    keys: ArchitectureKeys, found: Found, head_dim: int, kinds: Sequence[str]
) -> JsonObject:
    kv_heads = keys.numbers("attention.head_count_kv")
    by_layer = {}
    for layer, kind in enumerate(kinds):
        size = head_dim if kind == "sliding_attention" else found["head_dim"]
        by_layer[str(layer)] = {"head_dim": size, "num_key_value_heads": kv_heads[layer]}
    # In layers that see all tokens, a file without values has them in the keys.
    has_values = keys.layers_with("attn_v.weight")
    is_full = [kind == "full_attention" for kind in kinds]
    values_are_keys = any(is_full) and not has_values[is_full.index(True)]
    return {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": by_layer,
        "attention_k_eq_v": values_are_keys,
    }


def _gguf_feed_forward(keys: ArchitectureKeys, found: Found) -> JsonObject:
    sizes = keys.numbers("feed_forward_length")
    num_shared = keys.number("attention.shared_kv_layers", int, 0)
    if not 0 <= num_shared < len(sizes):
        raise BadCheckpoint(
            f"{keys.full('attention.shared_kv_layers')} is {num_shared:,}; it must be 0 to "
            f"{len(sizes) - 1}"
        )
    # Layers that read the K and V of others may have twice the size.
    is_double = num_shared > 0 and sizes[-1] == 2 * sizes[0]
    num_own = len(sizes) - num_shared
    expected = [sizes[0]] * num_own + [sizes[-1]] * num_shared
    if sizes != expected or (sizes[-1] != sizes[0] and not is_double):
        raise UnsupportedModel(
            f"{keys.full('feed_forward_length')} is {sizes}; supported is one size, or twice the "
            f"size in the last {num_shared} layers"
        )
    values: JsonObject = {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}
    if not keys.number("expert_count", int, 0):
        return values
    wanted = {
        "num_experts": gguf.GgufKey("expert_count", int),
        "top_k_experts": gguf.GgufKey("expert_used_count", int),
        "moe_intermediate_size": gguf.SIZE,
    }
    return {**values, **gguf.said(keys, found, wanted), "enable_moe_block": True}


_GGUF_NAMES = {
    **gguf.NORMS_AFTER,
    "ffn_norm": "pre_feedforward_layernorm",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    # Experts
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}


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
# The same text model without inputs for each layer.
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
    "Gemma4ForCausalLM": replace(
        _GEMMA4,
        gguf={
            "gemma4": gguf.Architecture(
                more=_gguf_gemma4,
                reads=("final_logit_softcapping", *gguf.EXPERTS),
                parts=_GGUF_NAMES,
                outside={
                    "per_layer_token_embd": "model.embed_tokens_per_layer",
                    "per_layer_model_proj": "model.per_layer_model_projection",
                    "per_layer_proj_norm": "model.per_layer_projection_norm",
                },
                by_layer=("attention.head_count_kv", "feed_forward_length"),
            )
        },
    ),
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, tower=gemma4_towers),
    "Gemma4TextModel": replace(_GEMMA4, task="embed"),
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(_UNIFIED, tower=gemma4_unified),
    "Gemma4UnifiedTextModel": replace(_UNIFIED, task="embed"),
}
