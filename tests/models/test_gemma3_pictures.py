"""Logits of Gemma 3 after each token of prompts with pictures, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import ints
from tests.models.many import Checkpoint
from tests.models.pictures import IMAGE_TOKEN, SIDE, make_with_pictures
from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBackend, AttentionBatch
from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.program_model import ProgramModel
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.executor.plain.tower import TorchTowerBackend
from weft.models.registry import DecoderModel, make_model
from weft.models.vision.tower import Tower, TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
NUM_TOKENS = 16  # of a picture
PICTURES_AT = (5, 30)
LENGTH = 60


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    text = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    folder: Path = tmp_path_factory.mktemp("gemma3")
    return make_with_pictures("gemma3", folder, mm_tokens_per_image=NUM_TOKENS, **text)


def prompt() -> list[int]:
    ids = [10 + 7 * place % 200 for place in range(LENGTH)]
    for first in PICTURES_AT:
        ids[first : first + NUM_TOKENS] = [IMAGE_TOKEN] * NUM_TOKENS
    return ids


def pictures() -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(len(PICTURES_AT), 3, SIDE, SIDE, generator=draw)


def expected(checkpoint: Checkpoint) -> Tensor:
    ids = torch.tensor([prompt()])
    types = (ids == IMAGE_TOKEN).long()
    with torch.inference_mode():
        found = checkpoint.model(input_ids=ids, pixel_values=pictures(), token_type_ids=types)
    logits: Tensor = found.logits[0]
    return logits


def sees_to() -> IntArray:
    ends = np.arange(1, LENGTH + 1, dtype=np.int32)
    for first in PICTURES_AT:
        ends[first : first + NUM_TOKENS] = first + NUM_TOKENS
    return ends


@torch.inference_mode()
def logits_of(
    model: DecoderModel, tower: Tower, attention: AttentionBackend, ends: IntArray | None
) -> Tensor:
    vectors = []
    for pixels in pictures():
        found = at_once(tower.encode(TowerInput("image", NUM_TOKENS, None, pixels)))
        vectors.append(found.float().clone())
    tokens = torch.tensor(prompt())
    places = torch.cat([torch.arange(first, first + NUM_TOKENS) for first in PICTURES_AT])
    tokens[places] = -1 - torch.arange(len(places))
    positions = torch.arange(LENGTH)
    table = torch.arange(LENGTH).view(1, -1).int()
    attention.prepare(
        AttentionBatch(
            ints([0]), ints([0]), ints([LENGTH]), positions, positions, table, sees_to=ends
        )
    )
    hidden = model.forward(tokens, positions, attention, torch.cat(vectors))
    return model.logits(hidden.clone()).clone()


def filled(checkpoint: Checkpoint, config: ModelConfig, model: DecoderModel, tower: Tower) -> None:
    weights = [*model.weights(), *tower.weights()]
    load_weights(iter(weights), checkpoint.folder, unread_of(config))


@pytest.mark.parametrize("kernels", [False, True])
def test_tokens_of_a_picture_see_each_other_in_all_layers(
    gemma3: Checkpoint, kernels: bool
) -> None:
    config = ModelConfig.from_folder(gemma3.folder)
    spec = config.vision
    assert spec is not None
    assert spec.rules.sees_both_ways
    pool = KVPool(config, LENGTH, CPU, torch.float32)
    model: DecoderModel
    attention: AttentionBackend
    if kernels:
        try:
            library = load()
        except Unavailable as problem:
            pytest.skip(str(problem))
        ops = CppOps(library, WeightFormat.F32)
        attention = CppPaged(config, pool, ops, LENGTH)
        model = ProgramModel(make_model(config, ops), ops, attention, config.hidden_size)
        tower = make_tower(spec, CppTowerBackend(library, WeightFormat.F32))
    else:
        attention = TorchPaged(config, pool)
        model = make_model(config, PlainOps(torch.float32, CPU))
        tower = make_tower(spec, TorchTowerBackend(torch.float32, CPU))
    filled(gemma3, config, model, tower)
    wanted = expected(gemma3)
    found = logits_of(model, tower, attention, sees_to())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # It makes a difference.
    one_way = logits_of(model, tower, attention, None)
    assert (one_way - wanted).abs().max() > 0.01
