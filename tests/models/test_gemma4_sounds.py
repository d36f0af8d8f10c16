"""Gemma 4's encoder of sounds compared with transformers on tiny random checkpoints; and log
probabilities of tokens behind sounds and pictures: whole, in chunks, cached and retracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.gemma4_media import (
    IN_FOUR_WAYS,
    NUM_BANDS,
    Heard,
    Prompt,
    Seen,
    assert_told,
    frames,
    heard_inputs_of,
    loaded,
)
from tests.models.many import Checkpoint
from tests.models.media_checks import (
    assert_all_told,
    assert_found_again,
    assert_matrices_count,
    assert_retracted_go_on,
    assert_weights_come_back,
    backends,
)
from tests.models.pictures import GEMMA4_AUDIO, make_gemma4
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.config.vision.gemma4_sound import gemma4_sound
from weft.models.vision.tower import TowerInput, at_once

# Frames of one token and of several, with all frames of the last token and with one.
LENGTHS = [1, 4, 37, 96, 41]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_gemma4("small", tmp_path_factory.mktemp("gemma4"), GEMMA4_AUDIO)


@pytest.mark.parametrize("is_limited", [True, False])
def test_vectors_are_those_of_transformers(
    hearing: Checkpoint, tmp_path: Path, is_limited: bool
) -> None:
    checkpoint = hearing
    if not is_limited:
        audio = {**GEMMA4_AUDIO, "use_clipped_linears": False, "attention_logit_cap": 2.0}
        checkpoint = make_gemma4("small", tmp_path, audio)
    for backend in backends():
        tower = loaded(checkpoint, backend)
        for length in LENGTHS:
            values = frames(length)
            with torch.inference_mode():
                heard = checkpoint.model.model.get_audio_features(
                    *heard_inputs_of([values]).values()
                )
                wanted = heard.pooler_output[heard.attention_mask]
                given = TowerInput("audio", len(wanted), None, torch.from_numpy(values))
                vectors = at_once(tower.encode(given)).float()
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=2e-5)
        for shape, length in (((8, NUM_BANDS), 3), ((8, 3), 2), ((0, NUM_BANDS), 1)):
            wrong = TowerInput("audio", length, None, torch.zeros(shape))
            with pytest.raises(ValueError, match=rf"tokens has the shape \[{shape[0]}, {shape[1]}"):
                at_once(tower.encode(wrong))


def test_weights_are_given_back_as_they_came(hearing: Checkpoint) -> None:
    tower = loaded(hearing, backends()[1])
    assert_weights_come_back(hearing, tower, lambda name: "audio" in name or "vision" in name)
    assert_matrices_count(hearing, tower, "image", "audio")


SHORT = Heard(1, 18)
LONG = Heard(2, 61)
PICTURE = Seen(1, 3, 4)
PROMPTS = [Prompt(1, 5, SHORT, 9), Prompt(2, LONG, 7, PICTURE, 4), Prompt(3, 2, PICTURE, LONG, 1)]


@IN_FOUR_WAYS
def test_log_probabilities_are_those_of_transformers(
    hearing: Checkpoint, settings: dict[str, Any]
) -> None:
    assert_all_told(hearing, PROMPTS, assert_told, 3, **settings)


def test_a_sound_that_was_heard_is_found_in_the_cache(hearing: Checkpoint) -> None:
    changed = Prompt(2, LONG, 7, Heard(9, 20), 4), 16 + 7
    assert_found_again(hearing, PROMPTS[1], [changed], assert_told, 3)


def test_retracted_requests_go_on_with_the_same_sounds(hearing: Checkpoint) -> None:
    assert_retracted_go_on(hearing, PROMPTS, assert_told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_context_right": 2}, "attention_context_right"),
        ({"gradient_clipping": 10.0}, "gradient_clipping of 10; at least 1e"),
        ({"subsampling_conv_channels": [10, 4]}, r"\[10, 4\]; two numbers up to 4,096"),
        ({"attention_context_left": 9}, "attention_context_left of 9; 2 to 7 are supported"),
        ({"num_attention_heads": 5}, "48 numbers for 5 heads"),
    ],
)
def test_encoders_of_other_kinds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gemma4_sound({"audio_config": {**GEMMA4_AUDIO, **changes}}, 64)


def test_sounds_are_heard_in_order_where_tokens_of_pictures_see_each_other(tmp_path: Path) -> None:
    checkpoint = make_gemma4("large", tmp_path, GEMMA4_AUDIO)
    spec = ModelConfig.from_folder(checkpoint.folder).vision
    assert spec is not None
    assert spec.rules.sees_both_ways
    assert spec.rules.kinds_in_order == ("audio",)
    assert_all_told(checkpoint, PROMPTS, assert_told, 3)
