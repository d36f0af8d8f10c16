"""Sounds for Qwen2-Audio, compared with the processor of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from weft.arrays import FloatArray
from weft.config.model_errors import ModelError
from weft.text.media.qwen2_audio import PLACEHOLDER, Qwen2Audio

RATE = 16_000
BANDS = {"feature_size": 128}
# Lengths around multiples of a frame, of two, and of the longest.
LENGTHS = [321, 480, 481, 640, 641, 799, 961, 1_121, 16_000, 47_999, 479_600, 479_900, 480_000]


def sounds(length: int) -> list[FloatArray]:
    rng = np.random.default_rng(length)
    noise = 0.1 * rng.standard_normal(length)
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(length) / RATE)
    tone[-10:] = 0.5  # a click
    return [array.astype(np.float32) for array in (noise, tone, np.zeros(length))]


@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_lengths_are_those_of_transformers(length: int) -> None:
    extractor = WhisperFeatureExtractor(**BANDS)
    processor = Qwen2Audio({}, BANDS)
    for samples in sounds(length):
        prepared = processor.audio(samples)
        (part,) = prepared.parts
        inputs = _by_transformers(extractor, samples)
        assert part.length == inputs["num_audio_tokens"][0]
        assert prepared.text == PLACEHOLDER * part.length
        # With torch it computes in float32, which rounds away what is much quieter than the rest.
        there = inputs["input_features"][0][:, : part.values.shape[1]]
        np.testing.assert_allclose(part.values, there, atol=1e-4)
        # Without torch it computes as we do.
        silent = np.zeros(480_000, np.float32)
        silent[:length] = samples
        exact = extractor._np_extract_fbank_features(silent[None], "cpu")[0]
        np.testing.assert_allclose(part.values, exact[:, : part.values.shape[1]], atol=1e-6)


def _by_transformers(extractor: Any, samples: FloatArray) -> Any:
    """What its processor makes of one sound, which needs no tokenizer."""

    class Processor(Qwen2AudioProcessor):
        def __init__(self) -> None:
            self.feature_extractor = extractor
            self.audio_token = PLACEHOLDER

    inputs, texts = Processor()._process_audio([samples], sampling_rate=RATE)
    assert texts == [PLACEHOLDER * inputs["num_audio_tokens"][0]]
    return inputs


def test_frames_that_the_encoder_does_not_look_at_are_left_out() -> None:
    processor = Qwen2Audio({}, BANDS)
    (part,) = processor.audio(np.zeros(RATE, np.float32)).parts
    assert part.values.shape == (128, 101)
    assert part.length == 25
    assert part.kind == "audio"
    assert part.grid is None


def test_sounds_that_the_model_cannot_take_are_refused() -> None:
    processor = Qwen2Audio({}, BANDS)
    with pytest.raises(ValueError, match=r"is 320; at least 321 samples"):
        processor.audio(np.zeros(320, np.float32))
    with pytest.raises(ValueError, match=r"30.1 s.* at most 30 s"):
        processor.audio(np.zeros(481_600, np.float32))


def test_a_processor_that_does_not_fit_the_encoder_is_refused() -> None:
    with pytest.raises(ModelError, match=r"3000 frames of 128 bands.*3000 of 80"):
        Qwen2Audio({}, {})
    with pytest.raises(ModelError, match=r"3000 frames of 128 bands.*2000 of 128"):
        Qwen2Audio({}, {**BANDS, "chunk_length": 20})
    with pytest.raises(ModelError, match="dither"):
        Qwen2Audio({}, {**BANDS, "dither": 0.1})
    Qwen2Audio({"audio_config": {"num_mel_bins": 80, "max_source_positions": 1000}}, SHORT)


SHORT = {"feature_size": 80, "chunk_length": 20}
