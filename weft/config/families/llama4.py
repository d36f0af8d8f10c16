"""Llama 4: layers without rotation among rotated ones, norms after the rotation, and experts whose
inputs are weighted.

Rotated layers attend within chunks of the context, and the queries of the others grow with
positions beyond `floor_scale`. Contexts end where the first of both would begin, so neither is
computed. The encoder of pictures is not implemented: the text part of such a model is served.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, number, size
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
from weft.config.families.experts import checked, with_experts
from weft.config.families.family import FULL, Config, Family, activation, flag, layer_types
from weft.config.families.rope import read_rope
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping

CHUNKED = "chunked_attention"
THETA = 500_000.0


def _llama4(config: Config) -> DecoderSpec:
    rotated = _attention(config)
    plain = replace(rotated, rope=None, qk_norm=QkNorm.NONE)
    mlp = MlpSpec(
        size=size(config, "intermediate_size_mlp", size(config, "intermediate_size")),
        activation=activation(config),
    )
    layers = tuple(
        LayerSpec(attention=rotated if turns else plain, mlp=mlp) for turns in _rotated(config)
    )
    names = TensorNames(
        mlp="feed_forward",
        experts=ExpertNames(router="router", shared="shared_expert", is_transposed=True),
    )
    spec = DecoderSpec(layers=layers, names=names)
    chosen = _layers_with_experts(config)
    return with_experts(config, spec, _experts(config), lambda layer: layer in chosen)


def _attention(config: Config) -> AttentionSpec:
    bias = flag(config, "attention_bias")
    return AttentionSpec(
        rope=read_rope(config, theta=THETA, side_by_side=True),
        qk_norm=QkNorm.ROTATED_HEAD if flag(config, "use_qk_norm", True) else QkNorm.NONE,
        qk_norm_weight=False,
        qkv_bias=bias,
        out_bias=bias,
    )


def _rotated(config: Config) -> list[bool]:
    """For each layer, whether its queries and keys are rotated."""
    num_layers = size(config, "num_hidden_layers")
    found = get(config, "no_rope_layers", list, [])  # 1: rotated
    if not found:
        period = size(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(found) < num_layers:
        raise UnsupportedModel(f"no_rope_layers has {len(found)} layers of {num_layers}")
    return [bool(one) for one in found[:num_layers]]


def _layers_with_experts(config: Config) -> set[int]:
    found = config.get("moe_layers")
    if found is None:
        step = size(config, "interleave_moe_layer_step", 1)
        return set(range(step - 1, size(config, "num_hidden_layers"), step))
    return set(get(config, "moe_layers", list))


def _experts(config: Config) -> MoeSpec:
    num_chosen = size(config, "num_experts_per_tok", 1)
    if num_chosen != 1:
        raise UnsupportedModel(
            f"num_experts_per_tok is {num_chosen}; only 1 is supported, as Llama 4 has it"
        )
    inner = size(config, "intermediate_size")
    router = RouterSpec(
        num_experts=size(config, "num_local_experts"), num_chosen=1, scores="sigmoid"
    )
    return MoeSpec(
        router=checked(router),
        size=inner,
        activation=activation(config),
        weights_inputs=True,
        shared_size=inner,
    )


def _context(config: Config) -> JsonMapping:
    """Contexts within one chunk, and before the queries grow."""
    longest = size(config, "max_position_embeddings")
    chunk = get(config, "attention_chunk_size", int, 0)
    default = [CHUNKED if turns and chunk else FULL for turns in _rotated(config)]
    kinds = layer_types(config, default.__getitem__, (FULL, CHUNKED))
    if CHUNKED in kinds:
        longest = min(longest, size(config, "attention_chunk_size"))
    if flag(config, "attn_temperature_tuning", True) and not all(_rotated(config)):
        # The factor of the query at position p is 1 + attn_scale ln(1 + (p + 1) // floor_scale).
        longest = min(longest, int(number(config, "floor_scale", 8_192.0, above=1.0)) - 1)
    return {"max_position_embeddings": longest}


FAMILY = Family(
    read=_llama4,
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5_120,
        "intermediate_size": 8_192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "attention_chunk_size": 8_192,
    },
    implied=_context,
)
FAMILIES = {"Llama4": FAMILY}
ARCHITECTURES = {"Llama4ForConditionalGeneration": FAMILY}
