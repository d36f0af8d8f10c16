"""Writes files of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.executor.driver import MODEL
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.weights.load import randomize


def checkpoint(scale: float = 1.0) -> dict[str, torch.Tensor]:
    model = make_model(MODEL, PlainOps(torch.float32, torch.device("cpu")))
    randomize(model.weights())
    return {weight.name: weight.get() * scale for weight in model.weights()}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


LARGE = replace(
    MODEL, vocab_size=20_000, hidden_size=512, num_heads=4, num_kv_heads=4, head_dim=128
)
