"""Encoders of the models of Qwen, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.many import Checkpoint
from tests.models.qwen_seeing import QWEN, features, make_qwen
from weft.config.model import ModelConfig
from weft.config.vision.qwen import QwenTowerSpec
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.tower import TorchTowerBackend
from weft.models.registry import make_model
from weft.models.vision.tower import Tower, TowerBackend, TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
Grid = tuple[int, int, int]
# Frames, rows and columns of tokens: windows that are cut, larger than the table of positions, one
# token, a video.
GRIDS: list[Grid] = [(1, 4, 5), (1, 1, 1), (1, 3, 6), (1, 7, 2), (3, 2, 4), (2, 5, 5)]


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module", params=QWEN)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_qwen(request.param, tmp_path_factory.mktemp("seeing"))


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    """The tower, with the weights that it gets beside the decoder."""
    config = ModelConfig.from_folder(checkpoint.folder)
    assert isinstance(config.vision, QwenTowerSpec)
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder, unread_of(config))
    return tower


def patches(grid: Grid, seed: int = 0, frames: int = 2) -> Tensor:
    num = 4 * grid[0] * grid[1] * grid[2]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3 * frames * 4 * 4, generator=generator)


@torch.inference_mode()
def encoded(tower: Tower, grid: Grid, values: Tensor) -> Tensor:
    length = grid[0] * grid[1] * grid[2]
    return at_once(tower.encode(TowerInput("image", length, grid, values))).float().clone()


def backends(kernels: Library) -> list[TowerBackend]:
    return [TorchTowerBackend(torch.float32, CPU), CppTowerBackend(kernels, WeightFormat.F32)]


def test_vectors_are_those_of_transformers(seeing: Checkpoint, kernels: Library) -> None:
    for backend in backends(kernels):
        tower = loaded(seeing, backend)
        for grid in GRIDS:
            values = patches(grid)
            wanted = features(seeing.model, values, grid)
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(encoded(tower, grid, values), wanted, rtol=1e-4, atol=1e-4)


def test_a_picture_fills_all_frames_of_a_patch(seeing: Checkpoint, kernels: Library) -> None:
    grid = (1, 2, 3)
    values = patches(grid, frames=1)
    twice = values.view(len(values), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1)
    for backend in backends(kernels):
        tower = loaded(seeing, backend)
        assert torch.equal(encoded(tower, grid, values), encoded(tower, grid, twice))


def test_vectors_do_not_depend_on_what_was_encoded_before(
    seeing: Checkpoint, kernels: Library
) -> None:
    tower = loaded(seeing, CppTowerBackend(kernels, WeightFormat.BF16))
    first = encoded(tower, GRIDS[0], patches(GRIDS[0]))
    encoded(tower, GRIDS[5], patches(GRIDS[5]))
    encoded(tower, GRIDS[0], patches(GRIDS[0], seed=1))
    assert torch.equal(encoded(tower, GRIDS[0], patches(GRIDS[0])), first)


def test_patches_of_another_shape_are_refused(seeing: Checkpoint) -> None:
    tower = loaded(seeing, TorchTowerBackend(torch.float32, CPU))
    with pytest.raises(ValueError, match=r"shape \[4, 5\]; this encoder reads \[4, 48\]"):
        encoded(tower, (1, 1, 1), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="at most are"):
        encoded(tower, (1, 1, 5000), torch.zeros(4 * 5000, 48))


def test_weights_are_given_back_as_they_came(seeing: Checkpoint, kernels: Library) -> None:
    stored = load_file(seeing.folder / "model.safetensors")
    for backend in backends(kernels):
        names = set()
        for weight in loaded(seeing, backend).weights():
            (name,) = [one for one in (weight.name, f"model.{weight.name}") if one in stored]
            torch.testing.assert_close(weight.get(), stored[name])
            names.add(name)
        assert names == {name for name in stored if "visual." in name}
