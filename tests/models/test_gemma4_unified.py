"""The pictures and sounds of the unified Gemma 4 compared with transformers on tiny random
checkpoints; and log probabilities of tokens behind both: whole, in chunks, cached and retracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.gemma4_media import (
    IN_FOUR_WAYS,
    PATCH,
    POOL,
    Heard,
    Seen,
    assert_told,
    loaded,
    pixels,
)
from tests.models.gemma4_media import Prompt as GemmaPrompt
from tests.models.many import Checkpoint
from tests.models.media_checks import (
    assert_all_told,
    assert_found_again,
    assert_matrices_count,
    assert_retracted_go_on,
    assert_weights_come_back,
    backends,
)
from tests.models.pictures import UNIFIED_SAMPLES, make_gemma4_unified
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.config.vision.gemma4_unified import gemma4_unified
from weft.messages.media import MediaItem
from weft.models.vision.tower import TowerInput, at_once

GRIDS = [(1, 3, 4), (1, 1, 2), (1, 2, 7), (1, 5, 1)]
SIDE = PATCH * POOL


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_gemma4_unified(tmp_path_factory.mktemp("unified"))


def waves(num_tokens: int, seed: int = 0) -> FloatArray:
    draw = np.random.default_rng((seed, num_tokens))
    return draw.standard_normal((num_tokens, UNIFIED_SAMPLES)).astype(np.float32)


def inputs_of(pictures: list[FloatArray]) -> dict[str, Tensor]:
    """As transformers' processor pads them: patches of a token, and their columns and rows."""
    cut = []
    for one in pictures:
        rows, columns = one.shape[1] // SIDE, one.shape[2] // SIDE
        by_token = one.reshape(3, rows, SIDE, columns, SIDE).transpose(1, 3, 2, 4, 0)
        at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
        cut.append((by_token.reshape(rows * columns, -1), at))
    most = max(len(at) for _, at in cut)
    patches = [np.pad(one, ((0, most - len(one)), (0, 0))) for one, _ in cut]
    places = [np.pad(at, ((0, most - len(at)), (0, 0)), constant_values=-1) for _, at in cut]
    return {
        "pixel_values": torch.from_numpy(np.stack(patches)),
        "image_position_ids": torch.from_numpy(np.stack(places)),
    }


class Prompt(GemmaPrompt):
    """A sound has so many tokens."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        found = inputs_of(self.pixels) if self.pixels else {}
        if self.frames:
            most = max(map(len, self.frames))
            padded = [np.pad(one, ((0, most - len(one)), (0, 0))) for one in self.frames]
            is_there = [np.arange(most) < len(one) for one in self.frames]
            found["input_features"] = torch.from_numpy(np.stack(padded))
            found["input_features_mask"] = torch.from_numpy(np.stack(is_there))
        return found

    def _heard(self, part: Heard) -> MediaItem:
        values = waves(part.num_frames, part.seed)
        self.frames.append(values)
        return self._item("audio", values, part.num_frames, None)


def test_vectors_are_those_of_transformers(unified: Checkpoint) -> None:
    inner = unified.model.model
    for backend in backends():
        tower = loaded(unified, backend)
        for grid in GRIDS:
            values = pixels(grid)
            with torch.inference_mode():
                found = inner.get_image_features(**inputs_of([values]))
                wanted = torch.cat(list(found.pooler_output))
                given = TowerInput("image", grid[1] * grid[2], grid, torch.from_numpy(values))
                vectors = at_once(tower.encode(given)).float()
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
        for num_tokens in (1, 7, 40):
            samples = torch.from_numpy(waves(num_tokens))
            with torch.inference_mode():
                wanted = inner.get_audio_features(samples[None]).pooler_output[0]
                given = TowerInput("audio", num_tokens, None, samples)
                vectors = at_once(tower.encode(given)).float()
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
        wrong = TowerInput("image", 4, (1, 2, 2), torch.zeros(3, 4, 4))
        with pytest.raises(ValueError, match="picture of 2 x 2 tokens has the shape"):
            at_once(tower.encode(wrong))
        long = TowerInput("image", 33, (1, 1, 33), torch.zeros(3, SIDE, 33 * SIDE))
        with pytest.raises(ValueError, match="up to 32 tokens of a side"):
            at_once(tower.encode(long))
        short = TowerInput("audio", 2, None, torch.zeros(3, UNIFIED_SAMPLES))
        with pytest.raises(ValueError, match=r"a sound of 2 tokens has the shape \[3, 20\]"):
            at_once(tower.encode(short))


def test_weights_are_given_back_as_they_came(unified: Checkpoint) -> None:
    tower = loaded(unified, backends()[1])
    assert_weights_come_back(unified, tower, lambda name: "language_model" not in name)
    assert_matrices_count(unified, tower, "image", "audio")


SOUND = Heard(1, 16)
PICTURE = Seen(1, 3, 4)
PROMPTS = [
    Prompt(1, 5, SOUND, 9),
    Prompt(2, SOUND, 7, PICTURE, 4),
    Prompt(3, 2, PICTURE, Heard(2, 11), 1),
]


@IN_FOUR_WAYS
def test_log_probabilities_are_those_of_transformers(
    unified: Checkpoint, settings: dict[str, Any]
) -> None:
    assert_all_told(unified, PROMPTS, assert_told, 3, **settings)


def test_what_was_seen_and_heard_is_found_in_the_cache(unified: Checkpoint) -> None:
    changed = Prompt(2, SOUND, 7, Seen(9, 3, 4), 4), 16 + 7
    assert_found_again(unified, PROMPTS[1], [changed], assert_told, 3)


def test_retracted_requests_go_on_with_the_same_media(unified: Checkpoint) -> None:
    assert_retracted_go_on(unified, PROMPTS, assert_told)


def test_pictures_may_be_seen_in_order(tmp_path: Path) -> None:
    checkpoint = make_gemma4_unified(tmp_path, use_bidirectional_attention=None)
    config = ModelConfig.from_folder(checkpoint.folder)
    assert config.vision is not None
    assert not config.vision.rules.sees_both_ways


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": {"mm_embed_dim": 8, "output_proj_dims": 9}}, "8 numbers for a patch"),
        ({"audio_config": {"audio_embed_dim": 8, "output_proj_dims": 9}}, "8 samples for a token"),
        ({"audio_config": {"audio_embed_dim": 99_999}}, "up to 65,536, are supported"),
    ],
)
def test_other_sizes_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gemma4_unified(config, 64)
