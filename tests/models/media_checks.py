"""What holds of every model with media: its tower gives the weights of its files back, and its
tokens are those of transformers: whole, in chunks, cached and retracted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from tests.models.gemma4_media import CPU, RETRACTED, AnyPrompt, Told
from tests.models.many import Checkpoint
from weft.config.model import ModelConfig
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.tower import TorchTowerBackend
from weft.models.vision.tower import Tower, TowerBackend
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Unavailable, load

AP = TypeVar("AP", bound=AnyPrompt)
# Compares an output, its tokens with their log probabilities, with what transformers computes.
AssertTold: TypeAlias = Callable[[Checkpoint, AP, tuple[list[int], list[float]]], None]


def backends() -> list[TowerBackend]:
    """That of torch, and that of the kernels."""
    try:
        kernels = load()
    except Unavailable as problem:
        pytest.skip(str(problem))
    return [TorchTowerBackend(torch.float32, CPU), CppTowerBackend(kernels, WeightFormat.F32)]


def assert_weights_come_back(
    checkpoint: Checkpoint,
    tower: Tower,
    is_of_tower: Callable[[str], bool],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """The weights of the tower are the tensors of the file whose names are its own."""
    stored = load_file(checkpoint.folder / "model.safetensors")
    ours = {weight.name: weight for weight in tower.weights()}
    for name in filter(is_of_tower, stored):
        found = ours.pop(name.removeprefix("model.")).get()
        torch.testing.assert_close(found, stored[name], rtol=rtol, atol=atol)
    assert not ours


def assert_matrices_count(checkpoint: Checkpoint, tower: Tower, *kinds: str) -> None:
    """The spec knows how many numbers the matrices of the tower have, and what it takes."""
    spec = ModelConfig.from_folder(checkpoint.folder).vision
    assert spec is not None
    matrices = sum(weight.get().numel() for weight in tower.weights() if len(weight.shape) > 1)
    assert spec.num_parameters == matrices
    assert spec.kinds == kinds


def assert_all_told(
    checkpoint: Checkpoint,
    prompts: Sequence[AP],
    assert_told: AssertTold[AP],
    num_runs: int,
    **settings: Any,
) -> None:
    """Served together, each has its tokens, and each different item is encoded once."""
    served = Told(checkpoint.folder, **settings)
    for prompt, output in zip(prompts, served.tell(*prompts), strict=True):
        assert_told(checkpoint, prompt, output)
    assert served.engine.services.stats().total_encoder_runs == num_runs


def assert_found_again(
    checkpoint: Checkpoint,
    first: AP,
    others: Sequence[tuple[AP, int]],
    assert_told: AssertTold[AP],
    num_runs: int,
) -> None:
    """The second time, `first` is in the cache; of each of `others`, so many tokens are."""
    served = Told(checkpoint.folder, page_size=1)
    (once,) = served.tell(first)
    (again,) = served.tell(first)
    assert again == once
    assert served.cached[1] == len(first.ids) - 1
    for index, (prompt, num_cached) in enumerate(others, 2):
        (output,) = served.tell(prompt)
        assert_told(checkpoint, prompt, output)
        assert served.cached[index] == num_cached
    assert served.engine.services.stats().total_encoder_runs == num_runs


def assert_retracted_go_on(
    checkpoint: Checkpoint, prompts: Sequence[AP], assert_told: AssertTold[AP]
) -> None:
    served = Told(checkpoint.folder, **RETRACTED)
    outputs = served.tell(*prompts, between=served.retracting())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_told(checkpoint, prompt, output)
    assert served.engine.scheduler.counters.num_retractions > 3
