"""Gemma 4's encoder compared with transformers on tiny random checkpoints; and log probabilities of
tokens behind pictures, served whole, in chunks and from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.gemma4_media import (
    SIDE,
    Prompt,
    Seen,
    assert_told,
    inputs_of,
    loaded,
    pixels,
)
from tests.models.many import Checkpoint
from tests.models.media_checks import (
    assert_all_told,
    assert_found_again,
    assert_matrices_count,
    assert_weights_come_back,
    backends,
)
from tests.models.pictures import GEMMA4, make_gemma4
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.models.vision.tower import TowerInput, at_once

GRIDS = [(1, 3, 4), (1, 1, 2), (1, 2, 7), (1, 5, 1)]


@pytest.fixture(scope="module", params=GEMMA4)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_gemma4(request.param, tmp_path_factory.mktemp("gemma4"))


def test_vectors_are_those_of_transformers(seeing: Checkpoint) -> None:
    for backend in backends():
        tower = loaded(seeing, backend)
        for grid in GRIDS:
            values = pixels(grid)
            with torch.inference_mode():
                found = seeing.model.model.get_image_features(**inputs_of([values]))
                wanted = torch.cat(list(found.pooler_output))
                given = TowerInput("image", grid[1] * grid[2], grid, torch.from_numpy(values))
                vectors = at_once(tower.encode(given)).float()
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
        wrong = TowerInput("image", 4, (1, 2, 2), torch.zeros(3, 4, 4))
        with pytest.raises(ValueError, match="picture of 2 x 2 tokens has the shape"):
            at_once(tower.encode(wrong))
        long = TowerInput("image", 33, (1, 1, 33), torch.zeros(3, SIDE, 33 * SIDE))
        with pytest.raises(ValueError, match="66 patches of a side; at most are 64"):
            at_once(tower.encode(long))


def test_weights_are_given_back_as_they_came(seeing: Checkpoint) -> None:
    tower = loaded(seeing, backends()[1])
    assert_weights_come_back(seeing, tower, lambda name: "vision" in name)
    assert_matrices_count(seeing, tower, "image")


ONE = Seen(1, 3, 4)
WIDE = Seen(2, 2, 7)
TALL = Seen(3, 5, 1)
PROMPTS = [Prompt(1, 5, ONE, 9), Prompt(2, ONE, 7, WIDE, 4), Prompt(3, 3, TALL, 2, WIDE, 1, ONE, 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernels": "torch"},
        {"chunked_prefill_size": 1, "page_size": 1, "max_encoder_tokens": 1},
        {"chunked_prefill_size": 7, "page_size": 2, "overlap": False},
    ],
    ids=["kernels", "torch", "pieces", "chunks"],
)
def test_log_probabilities_are_those_of_transformers(
    seeing: Checkpoint, settings: dict[str, Any]
) -> None:
    assert_all_told(seeing, PROMPTS, assert_told, 3, **settings)


def test_a_picture_that_was_seen_is_found_in_the_cache(seeing: Checkpoint) -> None:
    # Behind other text, and beside another picture.
    moved = Prompt(4, 2, ONE, 3), 0
    changed = Prompt(2, ONE, 7, Seen(9, 2, 7), 4), 12 + 7
    assert_found_again(seeing, PROMPTS[1], [moved, changed], assert_told, 3)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"num_key_value_heads": 1}, "3 heads with 1 KV heads"),
        ({"head_dim": 18}, "a head_dim of 18; a multiple of 4"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
    ],
)
def test_encoders_of_other_kinds_are_refused(
    tmp_path: Path, vision: dict[str, Any], message: str
) -> None:
    checkpoint = make_gemma4("small", tmp_path, **vision)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(checkpoint.folder)
