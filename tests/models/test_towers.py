"""Encoders of pictures, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.many import Checkpoint
from tests.models.pictures import PICTURES, features, make_with_pictures
from weft.config.model import BadCheckpoint, ModelConfig
from weft.config.vision.pictures import PictureSpec
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


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module", params=PICTURES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_with_pictures(request.param, tmp_path_factory.mktemp("seeing"))


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    return ModelConfig.from_folder(checkpoint.folder)


def spec_of(checkpoint: Checkpoint) -> PictureSpec:
    spec = config_of(checkpoint).vision
    assert isinstance(spec, PictureSpec)
    return spec


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    """The tower, with the weights that it gets beside the decoder."""
    config = config_of(checkpoint)
    assert config.vision is not None
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder, unread_of(config))
    return tower


def picture(spec: PictureSpec, seed: int = 0) -> Tensor:
    side = spec.encoder.image_size
    return torch.randn(3, side, side, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def encoded(tower: Tower, spec: PictureSpec, pixels: Tensor) -> Tensor:
    return at_once(tower.encode(TowerInput("image", spec.num_tokens, None, pixels))).float().clone()


def expected(checkpoint: Checkpoint, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return features(checkpoint.model, pixels)


def test_vectors_are_those_of_transformers(seeing: Checkpoint, kernels: Library) -> None:
    spec = spec_of(seeing)
    pixels = picture(spec)
    wanted = expected(seeing, pixels)
    assert wanted.shape == (spec.num_tokens, spec.out_size)
    assert wanted.abs().max() > 0.1
    backends: list[TowerBackend] = [
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(kernels, WeightFormat.F32),
    ]
    for backend in backends:
        found = encoded(loaded(seeing, backend), spec, pixels)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_twelve_bits_are_as_exact_as_bfloat16(seeing: Checkpoint, kernels: Library) -> None:
    spec = spec_of(seeing)
    pixels = picture(spec)
    wanted = expected(seeing, pixels)
    far = {}
    for format in (WeightFormat.I16, WeightFormat.BF16):
        found = encoded(loaded(seeing, CppTowerBackend(kernels, format)), spec, pixels)
        far[format] = float((found - wanted).norm() / wanted.norm())
        assert torch.cosine_similarity(found, wanted).min() > 0.9999
    assert far[WeightFormat.I16] < 2 * far[WeightFormat.BF16]


def test_vectors_do_not_depend_on_pictures_before(seeing: Checkpoint, kernels: Library) -> None:
    spec = spec_of(seeing)
    tower = loaded(seeing, CppTowerBackend(kernels, WeightFormat.BF16))
    first = encoded(tower, spec, picture(spec))
    other = encoded(tower, spec, picture(spec, seed=1))
    assert not torch.equal(first, other)
    assert torch.equal(encoded(tower, spec, picture(spec)), first)


@torch.inference_mode()
def test_a_picture_is_encoded_in_pieces_that_may_be_given_up(seeing: Checkpoint) -> None:
    spec = spec_of(seeing)
    tower = loaded(seeing, CppTowerBackend(load(""), WeightFormat.F32))
    given = TowerInput("image", spec.num_tokens, None, picture(spec))
    whole = at_once(tower.encode(given)).clone()
    given_up = tower.encode(given._replace(values=picture(spec, seed=1)))
    for _ in range(9):
        next(given_up)
    given_up.close()
    pieces = tower.encode(given)
    for _ in range(10):
        next(pieces)
    assert torch.equal(at_once(pieces), whole)


def test_a_picture_of_another_size_is_refused(seeing: Checkpoint) -> None:
    spec = spec_of(seeing)
    tower = loaded(seeing, TorchTowerBackend(torch.float32, CPU))
    with pytest.raises(ValueError, match=r"has the shape \[3, 8, 9\]; this encoder reads \[3, "):
        encoded(tower, spec, torch.zeros(3, 8, 9))


def test_weights_are_given_back_as_they_came(seeing: Checkpoint, kernels: Library) -> None:
    stored = load_file(seeing.folder / "model.safetensors")
    for backend in (
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(kernels, WeightFormat.F32),
    ):
        for weight in loaded(seeing, backend).weights():
            names = (weight.name, f"model.{weight.name}")
            (name,) = [one for one in names if one in stored]
            torch.testing.assert_close(weight.get(), stored[name])


def renamed(checkpoint: Checkpoint, folder: Path, names: dict[str, str]) -> Checkpoint:
    """A copy whose tensors have other beginnings of names."""
    stored = load_file(checkpoint.folder / "model.safetensors")
    changed = {}
    for name, tensor in stored.items():
        for before, now in names.items():
            if name.startswith(before):
                name = now + name.removeprefix(before)
                break
        changed[name] = tensor
    save_file(changed, folder / "model.safetensors")
    (folder / "config.json").write_text((checkpoint.folder / "config.json").read_text())
    return replace_folder(checkpoint, folder)


def replace_folder(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    return checkpoint._replace(folder=folder)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_with_pictures("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize(
    "names",
    [
        # As the files of the makers have them.
        {"vision_tower.": "vision_tower.vision_model."},
        # As newer versions of transformers have modules.
        {
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
            "language_model.model.": "model.language_model.",
        },
    ],
)
def test_checkpoints_call_towers_in_several_ways(
    gemma3: Checkpoint, tmp_path: Path, names: dict[str, str]
) -> None:
    spec = spec_of(gemma3)
    other = renamed(gemma3, tmp_path, names)
    tower = loaded(other, TorchTowerBackend(torch.float32, CPU))
    pixels = picture(spec)
    torch.testing.assert_close(
        encoded(tower, spec, pixels), expected(gemma3, pixels), rtol=1e-4, atol=1e-4
    )


def test_a_tensor_of_the_tower_that_is_missing_or_too_many_is_named(
    gemma3: Checkpoint, tmp_path: Path
) -> None:
    other = renamed(gemma3, tmp_path, {"vision_tower.post": "vision_tower.posted"})
    with pytest.raises(BadCheckpoint, match=r"missing: .*post_layernorm.*unexpected: .*posted_"):
        loaded(other, TorchTowerBackend(torch.float32, CPU))


def test_without_its_tower_a_model_skips_the_tensors_of_it(gemma3: Checkpoint) -> None:
    config = replace(config_of(gemma3), vision=None)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(decoder.weights(), gemma3.folder, unread_of(config))


def test_the_memory_of_the_tower_counts(seeing: Checkpoint) -> None:
    config = config_of(seeing)
    tower = loaded(seeing, TorchTowerBackend(torch.float32, CPU))
    matrices = sum(weight.get().numel() for weight in tower.weights() if len(weight.shape) > 1)
    assert config.vision is not None
    assert config.vision.num_parameters == matrices
    alone = replace(config, vision=None)
    assert config.weights_bytes - alone.weights_bytes == 4 * matrices
