"""Llama 4: layers without rotation among rotated ones, norms after the rotation, and experts whose
inputs are weighted.

Rotated layers attend within chunks of the context; the queries of the others grow with positions
beyond `floor_scale`.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import count, get, number, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QkNorm,
    RopeConfig,
    RouterSpec,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import checked, with_experts
from weft.config.families.family import FULL, Config, Family, activation, flag, layer_types
from weft.config.families.gguf import ArchitectureKeys, Found, GgufKey
from weft.config.families.rope import read_rope
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.llama4 import llama4
from weft.json_types import JsonObject

CHUNKED = "chunked_attention"
THETA = 500_000.0
PERIOD = 4  # the last of so many layers is not rotated
EXPERTS_OF_MAVERICK = 128


def _llama4(config: Config) -> DecoderSpec:
    rotated = _attention(config)
    plain = replace(rotated, rope=_growth(config), qk_norm=QkNorm.NONE)
    mlp = MlpSpec(
        size=size(config, "intermediate_size_mlp", size(config, "intermediate_size")),
        activation=activation(config),
    )
    chunk = get(config, "attention_chunk_size", int, 0)
    turns = _rotated(config)
    default = [CHUNKED if turned and chunk else FULL for turned in turns]
    layers = []
    for turned, kind in zip(
        turns, layer_types(config, default.__getitem__, (FULL, CHUNKED)), strict=True
    ):
        attention = rotated if turned else plain
        if kind == CHUNKED:
            window = size(config, "attention_chunk_size")
            attention = replace(attention, window=window, chunked=True)
        layers.append(LayerSpec(attention=attention, mlp=mlp))
    names = TensorNames(
        mlp="feed_forward",
        experts=ExpertNames(
            router="router",
            shared="shared_expert",
            # The key is only in weft's own config.json (`config/gguf.py`).
            is_transposed=not flag(config, "gates_and_ups_are_apart"),
        ),
    )
    spec = DecoderSpec(layers=tuple(layers), names=names)
    if not count(config, "num_local_experts"):
        return spec
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


def _growth(config: Config) -> RopeConfig | None:
    """What positions do in a layer that is not rotated: the query at position p is multiplied by 1
    + attn_scale ln(1 + (p + 1) // floor_scale). Source: arXiv:2501.19399."""
    if not flag(config, "attn_temperature_tuning", True):
        return None
    return RopeConfig(
        scaling="none",
        query_growth=number(config, "attn_scale", 0.1),
        growth_offset=1,
        original_max_position=size(config, "floor_scale", 8_192),
    )


def _rotated(config: Config) -> list[bool]:
    """For each layer, whether its queries and keys are rotated."""
    num_layers = size(config, "num_hidden_layers")
    found = get(config, "no_rope_layers", list, [])  # 1: rotated
    if not found:
        period = size(config, "no_rope_layer_interval", PERIOD)
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
    # The first key is only in weft's own config.json, as above.
    inner = size(config, "intermediate_size_moe", size(config, "intermediate_size"))
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


# GGUF files


def _gguf(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """A file says neither the size of chunks nor the growth of queries: llama.cpp has the numbers
    of the two models that Meta made, and norms queries and keys in all but the larger one."""
    values: JsonObject = {
        "intermediate_size_mlp": found["intermediate_size"],
        "num_local_experts": keys.number("expert_count", int, 0),
        "gates_and_ups_are_apart": True,
    }
    if values["num_local_experts"]:
        values |= _gguf_experts(keys, found)
    values["use_qk_norm"] = values["num_local_experts"] != EXPERTS_OF_MAVERICK
    num_layers = found["num_hidden_layers"]
    if keys.number(gguf.WINDOW, int, -1) == 0:
        # Such a file has no chunks, and all of its layers are rotated.
        return values | {
            "layer_types": [FULL] * num_layers,
            "no_rope_layers": [1] * num_layers,
            "attn_temperature_tuning": False,
        }
    period = keys.number(f"{gguf.WINDOW}_pattern", int, PERIOD)
    kinds = [CHUNKED if period and (at + 1) % period else FULL for at in range(num_layers)]
    return values | {
        "layer_types": kinds,
        "no_rope_layer_interval": PERIOD,
        "attention_chunk_size": 8_192,
        "floor_scale": 8_192,
        "attn_scale": 0.1,
    }


_gguf_experts = gguf.experts(
    gguf.SIGMOID,
    {
        **gguf.CHOSEN,
        "intermediate_size_moe": gguf.SIZE,
        "interleave_moe_layer_step": GgufKey("interleave_moe_layer_step", int),
    },
)
ARCHITECTURE = gguf.Architecture(
    more=_gguf,
    reads=gguf.EXPERTS,
    parts={
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_exps": "feed_forward.experts.gate_proj",
        "ffn_up_exps": "feed_forward.experts.up_proj",
        "ffn_down_exps": "feed_forward.experts.down_proj",
        "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
)


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
)
FAMILIES = {"Llama4": replace(FAMILY, gguf={"llama4": ARCHITECTURE})}
ARCHITECTURES = {"Llama4ForConditionalGeneration": replace(FAMILY, tower=llama4)}
