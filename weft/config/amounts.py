"""Amounts as texts for users: bytes, and parameters of models."""

from __future__ import annotations

from weft.config.model import ModelConfig

GB = 1_000_000_000


def size(num_bytes: float) -> str:
    """A number of bytes as a text: 3.1 PB, 2.0 TB, 16.4 GB, 512 MB, 4 kB."""
    if num_bytes >= 1e15:
        return f"{num_bytes / 1e15:,.1f} PB"
    if num_bytes >= 1e12:
        return f"{num_bytes / 1e12:.1f} TB"
    if num_bytes >= GB:
        return f"{num_bytes / GB:.1f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB"


def count(num_parameters: int) -> str:
    """A number of parameters as a text: 0.6 B, 11.4 M."""
    if num_parameters >= 5e8:
        return f"{num_parameters / 1e9:.1f} B"
    return f"{num_parameters / 1e6:.1f} M"


def parameters(model: ModelConfig) -> str:
    """The parameters of a model as a text; with experts, also the parameters that a token uses."""
    size = count(model.num_parameters)
    if model.has_experts:
        size += f", {count(model.num_active_parameters)} active"
    return size


def types(model: ModelConfig) -> str:
    """In which types a model computes and has its weights, as a text: "bfloat16, weights in int8".
    `model`: as it is kept."""
    if model.keeps_codes:
        return f"{model.dtype}, weights {stored_types(model)}"
    if model.quantize:
        return f"{model.dtype}, weights in {model.quantize}"
    return model.dtype


def stored_types(model: ModelConfig) -> str:
    """The formats of weights that stay as they are stored, and of those that are rounded."""
    if model.quantize and model.num_not_coded:
        return f"{model.stored.as_stored}, others in {model.quantize}"
    return model.stored.as_stored
