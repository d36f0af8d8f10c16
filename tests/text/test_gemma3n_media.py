"""Pictures and sounds for Gemma 3n, compared with the processors of transformers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Gemma3nProcessor
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from weft.config.model_errors import ModelError
from weft.text.media.families import make_processor
from weft.text.media.processor import MediaProcessor

# As in the release.
PICTURES = {"do_normalize": False, "resample": 2, "size": {"height": 768, "width": 768}}
OTHER = {
    "feature_size": 16,
    "preemphasis": 0.5,
    "input_scale_factor": 0.5,
    "frame_length_ms": 25.0,
    "per_bin_mean": [0.1 * band for band in range(16)],
    "per_bin_stddev": [1 + 0.1 * band for band in range(16)],
}
NAMES = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}


def made(folder: Path, settings: dict[str, Any], **config: Any) -> MediaProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    sections = {"audio_config": {"input_feat_size": settings.get("feature_size", 128)}}
    sections["vision_config"] = {"vocab_size": 128}
    config = {"architectures": ["Gemma3nForConditionalGeneration"], **sections, **config}
    processor = make_processor(folder, config)
    assert processor is not None
    return processor


def text_of(kind: str, length: int) -> str:
    """As transformers writes it."""
    tokens = SimpleNamespace(**NAMES, image_token_id=1, audio_token_id=2)
    processor = Gemma3nProcessor.__new__(Gemma3nProcessor)
    lengths = {"audio_seq_length": length, "image_seq_length": length}
    # It writes its texts, and then wants the classes of its parts.
    with suppress(TypeError, ValueError):
        Gemma3nProcessor.__init__(processor, None, None, tokens, **lengths)
    return str(getattr(processor, f"full_{kind}_sequence"))


@pytest.mark.parametrize("settings", [PICTURES, {"size": {"height": 256, "width": 256}}])
def test_pictures_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = made(tmp_path, settings)
    theirs = SiglipImageProcessorPil(**settings)
    for width, height in ((64, 48), (900, 1_000), (3, 600)):
        random = np.random.default_rng(width)
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        prepared = ours.image(picture)
        (part,) = prepared.parts
        want = theirs(picture, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(part.values[None], want)
        assert part.length == 257
        # The token that ends a picture has a vector of the encoder, and stands as the others do.
        whole = text_of("image", 256)
        assert prepared.text == whole.replace("<end_of_image>", "<image_soft_token>")


@pytest.mark.parametrize("settings", [{}, OTHER])
def test_sounds_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = made(tmp_path, {**PICTURES, **settings})
    theirs = Gemma3nAudioFeatureExtractor(**settings)
    assert ours.audio_rate == 16_000
    for length in (513, 640, 641, 12_345, 479_999, 480_000):
        drawn = 0.1 * np.random.default_rng(length).standard_normal(length)
        samples = drawn.astype(np.float32)
        inputs = theirs([samples], return_tensors="np")
        prepared = ours.audio(samples)
        (part,) = prepared.parts
        assert inputs["input_features_mask"].all()
        np.testing.assert_allclose(part.values, inputs["input_features"][0], atol=2e-6)
        assert part.length == 189
        whole = text_of("audio", 188)
        assert prepared.text == whole.replace("<end_of_audio>", "<audio_soft_token>")


def test_ends_that_are_in_the_vocabulary_of_the_text_stay(tmp_path: Path) -> None:
    ours = made(tmp_path, PICTURES, eoi_token_id=106, eoa_token_id=107)
    picture = ours.image(Image.new("RGB", (9, 9)))
    assert picture.text == text_of("image", 256)
    assert picture.parts[0].length == 256
    sound = ours.audio(np.zeros(999, np.float32))
    assert sound.text == text_of("audio", 188)
    assert sound.parts[0].length == 188


def test_sounds_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    ours = made(tmp_path, PICTURES)
    with pytest.raises(ValueError, match=r"is 512; at least 513 samples"):
        ours.audio(np.zeros(512, np.float32))
    with pytest.raises(ValueError, match=r"30.0 s.* at most 30 s"):
        ours.audio(np.zeros(480_001, np.float32))
    short = made(tmp_path, PICTURES, audio_soft_tokens_per_image=2)
    with pytest.raises(ValueError, match=r"at most 0.352 s"):
        short.audio(np.zeros(9_999, np.float32))


def test_a_model_may_have_one_encoder(tmp_path: Path) -> None:
    assert set(made(tmp_path, PICTURES, audio_config=None).marks) == {"image"}
    assert set(made(tmp_path, PICTURES, vision_config=None).marks) == {"audio"}
    assert set(made(tmp_path, PICTURES).marks) == {"image", "audio"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 300, "width": 300}}, "300 x 300 pixels; the encoder reads a multiple"),
        ({"size": {"height": 1_024, "width": 1_024}}, "a multiple of 256 up to 768"),
        ({"do_resize": False}, "do_resize"),
        ({"dither": 0.1}, "dither"),
        ({"preemphasis_htk_flavor": False}, "preemphasis_htk_flavor"),
        ({"feature_size": 64}, ""),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    sections: dict[str, Any] = {}
    if "feature_size" in settings:
        sections = {"audio_config": {"input_feat_size": 128}}
        message = "reads 128 bands; its feature extractor makes 64"
    with pytest.raises(ModelError, match=message):
        made(tmp_path, {**PICTURES, **settings}, **sections)
