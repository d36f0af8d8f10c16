"""Phi-1 to Phi-4. The first two have parallel attention and feed-forward part, and biases
everywhere. Phi-3 and Phi-4 are Llama with q, k and v in one tensor, gate and up in another, and
special frequencies for long contexts."""

from __future__ import annotations

from weft.config.config_json import get, require
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    RopeConfig,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import Config, Family, activation, window
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import longrope, read_rope, rope_values
from weft.json_types import JsonObject


def _phi(config: Config) -> DecoderSpec:
    require(config, "qk_layernorm", False)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("gelu_new",)),
            is_gated=False,
            bias=True,
        ),
        norms=NormPosition.PARALLEL,
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER_BIAS,
        names=TensorNames(
            out="dense",
            gate_up=("fc1",),
            down="fc2",
            norm="model.final_layernorm",
        ),
        head_bias=True,
    )


def _phi3(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(rope=_phi3_rope(config), window=window(config)),
        mlp=MlpSpec(activation=activation(config)),
    )
    return DecoderSpec(
        layers=(layer,),
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    )


def _phi3_rope(config: Config) -> RopeConfig:
    values = rope_values(config)
    # The first releases have other names for the same scaling.
    if get(values, "rope_type", str, get(values, "type", str, "")) in ("longrope", "su", "yarn"):
        return longrope(config, values)
    return read_rope(config, is_partial=True)


# GGUF files


def _gguf_phi3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Phi-3. A file has two lists of factors if the context of the model was extended."""
    more: JsonObject = {"sliding_window": keys.number("attention.sliding_window", int, 0)}
    short, long = keys.short_and_long_factors()
    if not long:
        return more
    original = keys.number("rope.scaling.original_context_length", int)
    rope = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", float, 10_000.0),
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": keys.number("rope.scaling.attn_factor", float, 1.0),
    }
    return {**more, "rope_parameters": rope, "original_max_position_embeddings": original}


FAMILIES = {
    "Phi": Family(
        read=_phi,
        defaults={"partial_rotary_factor": 0.5},
        norm_eps_key="layer_norm_eps",
        gguf={
            "phi2": gguf.Architecture(
                norm_eps=gguf.LAYER_NORM_EPS,
                has_gate=False,
                is_partial=True,
                splits_qkv=True,
                parts={
                    "attn_output": "self_attn.dense",
                    "ffn_up": "mlp.fc1",
                    "ffn_down": "mlp.fc2",
                },
                outside={"output_norm": "model.final_layernorm"},
            )
        },
    ),
    "Phi3": Family(
        read=_phi3,
        gguf={
            "phi3": gguf.Architecture(
                more=_gguf_phi3,
                is_partial=True,
                has_gate_in_up=True,
                parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            )
        },
    ),
}
