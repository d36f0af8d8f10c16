"""Voxtral compared with transformers on a tiny random checkpoint: spectrograms, vectors, and log
probabilities of tokens behind them: whole, in chunks, cached and retracted."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from tests.models.gemma4_media import (
    IN_FOUR_WAYS,
    Told,
    assert_likeliest,
    loaded,
)
from tests.models.many import Checkpoint
from tests.models.media_checks import (
    assert_all_told,
    assert_matrices_count,
    assert_retracted_go_on,
    backends,
)
from tests.models.pictures import IMAGE_TOKEN
from tests.models.sounds import VOXTRAL_AUDIO, VOXTRAL_TOKENS, make_voxtral
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.config.vision.stacked import StackedSpec, voxtral
from weft.messages.media import MediaItem
from weft.models.vision.tower import TowerInput, at_once
from weft.text.media.voxtral import BEGIN, PLACEHOLDER, Voxtral

RATE = 16_000
BANDS = VOXTRAL_AUDIO["num_mel_bins"]
NUM_FRAMES = 2 * VOXTRAL_AUDIO["max_source_positions"]
EXTRACTOR = {"feature_size": BANDS, "chunk_length": NUM_FRAMES // 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_voxtral(tmp_path_factory.mktemp("voxtral"))


def window(seed: int) -> FloatArray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((BANDS, NUM_FRAMES)).astype(np.float32)


class Prompt:
    """Numbers from 100 on are windows of sounds by their seeds, others so many tokens of text."""

    def __init__(self, seed: int, *parts: int) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.windows: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if part < 100:
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            values = window(part)
            self.windows.append(values)
            media.append(
                MediaItem(
                    kind="audio",
                    digest=hashlib.sha256(values.tobytes()).digest(),
                    start=len(self.ids),
                    length=VOXTRAL_TOKENS,
                    shape=values.shape,
                    values=values.tobytes(),
                )
            )
            self.ids += [IMAGE_TOKEN] * VOXTRAL_TOKENS
        self.media = tuple(media)


# Among them a sound of two windows, without anything between them.
PROMPTS = [Prompt(1, 5, 101, 9), Prompt(2, 102, 103, 7, 104, 4), Prompt(3, 2, 104, 101, 1)]


def assert_told(
    checkpoint: Checkpoint, prompt: Prompt, output: tuple[list[int], list[float]]
) -> None:
    """The tokens are the likeliest ones of transformers, with its log probabilities."""
    tokens, _ = output
    ids = torch.tensor([prompt.ids + tokens])
    features = torch.from_numpy(np.stack(prompt.windows))
    with torch.inference_mode():
        found = checkpoint.model(input_ids=ids, input_features=features)
    assert_likeliest(found.logits[0, len(prompt.ids) - 1 : -1], output)


def test_spectrograms_are_those_of_transformers() -> None:
    ours = Voxtral(voxtral({"audio_config": VOXTRAL_AUDIO}, 64), EXTRACTOR)
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)

    class Processor(VoxtralProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feature_extractor = extractor

    settings = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": RATE}
    settings |= {"max_source_positions": NUM_FRAMES}
    for length in (1, 900, RATE, RATE + 1, 40_000):
        noise = np.random.default_rng(length).standard_normal(length)
        samples = (0.1 * noise).astype(np.float32)
        prepared = ours.audio(samples)
        num_windows = -(-length // RATE)
        assert prepared.text == BEGIN + PLACEHOLDER * VOXTRAL_TOKENS * num_windows
        assert [part.length for part in prepared.parts] == [VOXTRAL_TOKENS] * num_windows
        wanted = Processor()._retrieve_input_features([samples], **settings)
        values = np.stack([part.values for part in prepared.parts])
        np.testing.assert_allclose(values, wanted, atol=1e-4)


def test_vectors_are_those_of_transformers(model: Checkpoint) -> None:
    for backend in backends():
        tower = loaded(model, backend)
        for seed in (1, 2):
            values = torch.from_numpy(window(seed))
            with torch.inference_mode():
                wanted = model.model.get_audio_features(values[None]).pooler_output
                given = TowerInput("audio", VOXTRAL_TOKENS, None, values)
                found = at_once(tower.encode(given)).float()
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for bands, frames, length in ((BANDS, 99, 25), (15, 100, 25), (BANDS, 100, 24)):
            with pytest.raises(ValueError, match=rf"the shape \[{bands}, {frames}\]"):
                at_once(tower.encode(TowerInput("audio", length, None, torch.zeros(bands, frames))))


def test_all_tensors_are_read(model: Checkpoint) -> None:
    tower = loaded(model, backends()[1])
    assert_matrices_count(model, tower, "audio")


@IN_FOUR_WAYS
def test_log_probabilities_are_those_of_transformers(
    model: Checkpoint, settings: dict[str, Any]
) -> None:
    assert_all_told(model, PROMPTS, assert_told, 4, **settings)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_was_heard_is_found_in_the_cache(model: Checkpoint, page_size: int) -> None:
    served = Told(model.folder, page_size=page_size)
    first = PROMPTS[1]
    (once,) = served.tell(first)
    (again,) = served.tell(first)
    assert again[0] == once[0]
    assert_told(model, first, again)
    assert served.cached[1] == len(first.ids) - 1
    # Another second window: the prompt is found up to its first token.
    changed = Prompt(2, 102, 109, 7, 104, 4)
    (output,) = served.tell(changed)
    assert_told(model, changed, output)
    assert 16 <= served.cached[2] <= VOXTRAL_TOKENS
    assert served.engine.services.stats().total_encoder_runs == 4


def test_retracted_requests_go_on_with_the_same_sounds(model: Checkpoint) -> None:
    assert_retracted_go_on(model, PROMPTS, assert_told)


def test_files_that_leave_out_what_is_usual_are_those_of_mini(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["VoxtralForConditionalGeneration"],
            "audio_config": {"model_type": "voxtral_encoder"},
            "text_config": {"model_type": "llama"},
            "torch_dtype": "bfloat16",
        },
        "Voxtral-Mini-3B",
    )
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (30, 8, 128)
    tower = config.vision
    assert isinstance(tower, StackedSpec)
    assert (tower.stack, tower.num_tokens, tower.out_size) == (4, 375, 3_072)
    assert tower.shown_name == "Whisper of 32 layers for sounds of up to 30 s"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embedding": True}, "scale_embedding"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"num_attention_heads": 5}, "32 numbers for 5 heads"),
        ({"intermediate_size": 80}, "do not divide each other"),
        ({"intermediate_size": 32 * 51}, "do not divide each other"),
        ({"max_source_positions": 5_000}, "max_source_positions is 5,000; at most 4,096"),
    ],
)
def test_encoders_that_are_not_computed_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        voxtral({"audio_config": {**VOXTRAL_AUDIO, **changes}}, 64)


def test_a_processor_that_does_not_fit_the_encoder_is_refused() -> None:
    with pytest.raises(
        ModelError, match="100 frames of 16 bands; its feature extractor makes 3000"
    ):
        Voxtral(voxtral({"audio_config": VOXTRAL_AUDIO}, 64), {"feature_size": BANDS})
