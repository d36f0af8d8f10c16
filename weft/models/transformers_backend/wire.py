"""The JSON form of a model description, for the process that requests it from another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec
from weft.config.model import ModelConfig, ParameterCount

PLAIN = (  # fields that JSON can hold unchanged
    *("architecture", "name", "vocab_size", "hidden_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_position"),
    *("norm_eps", "dtype", "bos_token_id", "library_config"),
)
OF_LAYER = ("window", "scale", "score_cap", "sinks", "kv_heads", "head_dim", "kv_of")


def to_wire(model: ModelConfig) -> dict[str, Any]:
    """All fields that `describe` finds."""
    assert model.counted is not None, "a model of ours describes itself"
    values: dict[str, Any] = {name: getattr(model, name) for name in PLAIN}
    values["eos_token_ids"] = list(model.eos_token_ids)
    values["counted"] = asdict(model.counted)
    values["layers"] = []
    for layer in model.decoder.layers:
        values["layers"].append({name: getattr(layer.attention, name) for name in OF_LAYER})
    return values


def from_wire(values: dict[str, Any]) -> ModelConfig:
    attention = [AttentionSpec(rope=None, **layer) for layer in values["layers"]]
    layers = [LayerSpec(attention=spec) for spec in attention]
    return ModelConfig(
        **{name: values[name] for name in PLAIN},
        eos_token_ids=tuple(values["eos_token_ids"]),
        counted=ParameterCount(**values["counted"]),
        decoder=DecoderSpec(layers=tuple(layers)),
    )
