"""Writes a model of random weights to a file that every engine can load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from weft.config.model import ModelConfig
from weft.executor.weights.load import randomize
from weft.models.registry import make_model
from weft.ops.plain import PlainOps


def save_random(config: ModelConfig, path: Path) -> None:
    """Random weights of the model's shape, in its dtype, as safetensors."""
    model = make_model(config, PlainOps(getattr(torch, config.dtype), torch.device("cpu")))
    randomize(model.weights())
    save_file({weight.name: weight.get() for weight in model.weights()}, path, {"format": "pt"})
