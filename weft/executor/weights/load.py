"""Fills a model with weights: from safetensors files, or with random ones."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path

import torch

from weft.executor.weights.fetch import weight_files
from weft.executor.weights.safetensors import FileContent
from weft.executor.weights.stream import matched, put_all
from weft.models.layers.weight import Weights

CPU = torch.device("cpu")


@torch.inference_mode()
def load_weights(weights: Weights, folder: Path) -> None:
    """Give the model the tensors of a checkpoint.

    Raises `BadCheckpoint`, naming the tensors, if any is missing, unexpected or of another shape; then nothing has
    changed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(FileContent(path)) for path in weight_files(folder)]
        found = matched(
            {weight.name: weight for weight in weights},
            files,
            f"the weights in {folder} do not fit its config.json",
        )
        for file in files:
            file.will_be_read()
        put_all(found)


@torch.inference_mode()
def randomize(weights: Weights, device: torch.device = CPU) -> None:
    """Weights that are random, but the same each time on this kind of device, which makes them: norms 1, all else
    normal with deviation 0.02."""
    for name, shape, put, _ in weights:
        if "norm" in name:
            put(torch.ones(shape, device=device))
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            put(torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator))
