"""Sounds for Gemma 4, compared with the processor of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from weft.config.model_errors import ModelError
from weft.text.media.families import make_processor
from weft.text.media.gemma4_sound import Gemma4Sounds, read_loudness
from weft.text.media.processor import MediaProcessor

OTHER = {
    "feature_size": 16,
    "fft_overdrive": True,
    "input_scale_factor": 0.5,
    "per_bin_mean": [0.1 * band for band in range(16)],
    "per_bin_stddev": [1 + 0.1 * band for band in range(16)],
}


def processor(**settings: Any) -> Gemma4Sounds:
    return Gemma4Sounds(read_loudness(settings), {})


@pytest.mark.parametrize("settings", [{}, OTHER])
def test_values_and_lengths_are_those_of_transformers(settings: dict[str, Any]) -> None:
    extractor = Gemma4AudioFeatureExtractor(**settings)
    for length in (161, 320, 321, 641, 12_345, 480_000):
        samples = 0.1 * np.random.default_rng(length).standard_normal(length)
        inputs = extractor([samples.astype(np.float32)], return_tensors="np")
        is_there = inputs["input_features_mask"][0]
        prepared = processor(**settings).audio(samples.astype(np.float32))
        (part,) = prepared.parts
        np.testing.assert_allclose(part.values, inputs["input_features"][0][is_there], atol=1e-6)
        assert part.length == is_there[::2][::2].sum()
        assert prepared.text == "<|audio>" + "<|audio|>" * part.length + "<audio|>"


def test_sounds_that_the_model_cannot_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is 160; at least 161 samples"):
        processor().audio(np.zeros(160, np.float32))
    with pytest.raises(ValueError, match=r"30.1 s.* at most 30 s"):
        processor().audio(np.zeros(481_600, np.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dither": 0.1}, "dither"),
        ({"preemphasis": 0.97}, "preemphasis"),
        ({"hop_length_ms": 30.0}, "frames of 320 every 480"),
        ({"sampling_rate": 10**9}, "1,000,000,000 samples a second"),
        ({"per_bin_mean": [1.0, 2.0]}, "per_bin_mean must have 128 numbers"),
        ({"per_bin_stddev": [0.0] * 128}, "per_bin_stddev has a 0"),
        ({"per_bin_stddev": [float("nan")] * 128}, "per_bin_stddev has numbers that are not fini"),
    ],
)
def test_settings_that_are_not_computed_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        processor(**settings)


def unified(folder: Path, settings: dict[str, Any], num_samples: int = 640) -> MediaProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "vision_config": {"patch_size": 16},
        "audio_config": {"audio_embed_dim": num_samples},
    }
    made = make_processor(folder, config)
    assert made is not None
    return made


def test_pieces_of_waveforms_are_those_of_transformers(tmp_path: Path) -> None:
    extractor = Gemma4UnifiedAudioFeatureExtractor()
    processor = unified(tmp_path, {"audio_samples_per_token": 640})
    assert set(processor.marks) == {"image", "audio"}
    assert processor.audio_rate == 16_000
    for length in (1, 640, 641, 12_345, 480_000):
        samples = np.random.default_rng(length).standard_normal(length).astype(np.float32)
        inputs = extractor([samples], return_tensors="np")
        prepared = processor.audio(samples)
        (part,) = prepared.parts
        np.testing.assert_array_equal(part.values, inputs["input_features"][0])
        assert part.length == len(part.values)
        assert prepared.text == "<|audio>" + "<|audio|>" * part.length + "<audio|>"
    for length in (0, 480_001):
        with pytest.raises(ValueError, match="takes up to 30 s, and at least one sample"):
            processor.audio(np.zeros(length, np.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"audio_samples_per_token": 320},
            "reads 640 samples for a token of a sound; .* makes 320",
        ),
        ({"sampling_rate": 10**9}, "1,000,000,000 samples a second; at most 192,000"),
    ],
)
def test_other_pieces_of_waveforms_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        unified(tmp_path, settings)
