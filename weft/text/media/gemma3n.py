"""The pictures and sounds of Gemma 3n, prepared for its encoders: squares of pixels, and the
logarithm of loudness in bands. Every picture and every sound takes as many tokens as all others.

The token that ends a picture or sound is not in the vocabulary of the text: its vector comes from
the encoder, as one more of the picture or sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from weft.arrays import FloatArray
from weft.config.config_json import require
from weft.config.model_errors import BadConfig
from weft.config.vision.gemma3n import (
    Gemma3nPictureSpec,
    Gemma3nSoundSpec,
    gemma3n_pictures,
    gemma3n_sounds,
)
from weft.config.vision.mobilenet import SIDE
from weft.messages.media import MediaKind
from weft.text.media.gemma3 import special_tokens
from weft.text.media.gemma4_sound import LoudnessSpec, bands_of, hann, read_loudness
from weft.text.media.joint import SeesAndHears
from weft.text.media.mel import FRAMES_AT_ONCE, Doubles
from weft.text.media.pixels import BICUBIC, Looks, Size, read_looks, side_of
from weft.text.media.processor import (
    MediaPart,
    MediaProcessor,
    PicturesAlone,
    PreparedMedia,
    SoundsAlone,
    WithoutKnobs,
    require_sound_length,
)
from weft.text.media.processor_files import read_extractor, read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

# The default tokens, for a tokenizer that does not name them.
BEGIN_IMAGE = "<start_of_image>"
IMAGE = "<image_soft_token>"
END_IMAGE = "<end_of_image>"
BEGIN_SOUND = "<start_of_audio>"
SOUND = "<audio_soft_token>"
END_SOUND = "<end_of_audio>"
# The defaults of a Gemma3nAudioFeatureExtractor.
USUAL_LOUDNESS = {
    "frame_length_ms": 32.0,
    "hop_length_ms": 10.0,
    "min_frequency": 125.0,
    "max_frequency": 7_600.0,
    "preemphasis": 0.97,
    "fft_overdrive": True,
    "mel_floor": 1e-5,
}
MAX_SECONDS = 30  # of a sound: transformers cuts off the rest
SAMPLE_STEP = 128  # sounds are filled up with silence to a multiple of it


class Gemma3nPictures(WithoutKnobs, PicturesAlone):
    """The `MediaProcessor` of pictures. Values are [3, side, side]."""

    def __init__(
        self, looks: Looks, side: int, spec: Gemma3nPictureSpec, names: Mapping[str, str]
    ) -> None:
        """`names`: the special tokens."""
        image = names.get("image_token", IMAGE)
        self.marks: Mapping[MediaKind, str] = {"image": image}
        self.placeholders: Mapping[MediaKind, str] = {"image": image}
        self._looks = looks
        self._size = Size(side, side)
        self._num_vectors = spec.num_vectors
        begin = names.get("boi_token", BEGIN_IMAGE)
        end = ""
        if spec.vocab.end is None:
            end = names.get("eoi_token", END_IMAGE)
        self._text = f"\n\n{begin}{image * spec.num_vectors}{end}\n\n"

    def image(self, image: Image) -> PreparedMedia:
        square = self._looks.resized(image, self._size)
        values = self._looks.values(np.asarray(square))
        part = MediaPart("image", self._num_vectors, None, values)
        return PreparedMedia(self._text, (part,))


class Gemma3nSounds(SoundsAlone):
    """The `MediaProcessor` of sounds. Values are [frames, bands]."""

    def __init__(
        self, loudness: LoudnessSpec, spec: Gemma3nSoundSpec, names: Mapping[str, str]
    ) -> None:
        sound = names.get("audio_token", SOUND)
        self.marks: Mapping[MediaKind, str] = {"audio": sound}
        self.placeholders: Mapping[MediaKind, str] = {"audio": sound}
        self.spec = loudness
        self._bands = bands_of(loudness)
        self._num_vectors = spec.num_vectors
        most_samples = spec.max_frames * loudness.hop + loudness.window
        most_samples -= most_samples % SAMPLE_STEP
        self._max_samples = min(most_samples, MAX_SECONDS * loudness.rate)
        begin = names.get("boa_token", BEGIN_SOUND)
        end = ""
        if spec.vocab.end is None:
            end = names.get("eoa_token", END_SOUND)
        self._text = f"\n\n{begin}{sound * spec.num_vectors}{end}\n\n"

    @property
    def audio_rate(self) -> int:
        return self.spec.rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        spec = self.spec
        require_sound_length(len(samples), self._max_samples, spec.rate)
        values = loudness(samples, spec, self._bands)
        if not len(values):
            least = spec.window // SAMPLE_STEP * SAMPLE_STEP + 1
            raise ValueError(
                f"the sound is too short: its length at {spec.rate:,} samples a second is "
                f"{len(samples):,}; at least {least:,} samples are needed"
            )
        part = MediaPart(kind="audio", length=self._num_vectors, grid=None, values=values)
        return PreparedMedia(self._text, (part,))


def loudness(samples: FloatArray, spec: LoudnessSpec, bands: Doubles) -> FloatArray:
    """[frames, bands] of the frames that lie within a sound [n] and the silence after it."""
    silence = -len(samples) % SAMPLE_STEP
    scaled = samples * spec.factor
    padded = np.pad(scaled, (0, silence)).astype(np.float32)
    # A frame also needs the sample that follows it.
    last_start = len(padded) - spec.window - 1
    if last_start < 0:
        return np.empty((0, spec.num_bands), np.float32)
    num_frames = last_start // spec.hop + 1
    every = sliding_window_view(padded, spec.window)
    frames = every[:: spec.hop][:num_frames]
    shape = hann(spec.window, kind=np.float32)  # as transformers does
    pieces = []
    for begin in range(0, len(frames), FRAMES_AT_ONCE):
        some = frames[begin : begin + FRAMES_AT_ONCE]
        emphasized = _emphasized(some, spec.emphasis)
        transformed = np.fft.rfft(emphasized * shape, n=spec.num_points)
        sizes = np.abs(transformed) @ bands
        audible = np.maximum(sizes, spec.floor)
        pieces.append(np.log(audible))
    levels = np.concatenate(pieces)
    found = (levels - spec.mean) / spec.deviation
    return found.astype(np.float32)


def _emphasized(frames: FloatArray, share: float) -> FloatArray:
    """Each sample less a share of the one before it, in its frame; the first less that of
    itself."""
    rest = np.float32(1.0 - share)
    first = frames[:, :1] * rest
    before = frames[:, :-1] * np.float32(share)
    others = frames[:, 1:] - before
    return np.concatenate((first, others), axis=1)


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a folder with this `config.json`; None: the model has no encoder. Raises
    ModelError."""
    pictures = gemma3n_pictures(config, out_size=1)
    sounds = gemma3n_sounds(config, out_size=1)
    sees = None if pictures is None else _pictures(folder, pictures)
    hears = None if sounds is None else _sounds(folder, sounds)
    if sees is not None and hears is not None:
        return SeesAndHears(sees, hears)
    return sees if hears is None else hears


def _pictures(folder: Path, spec: Gemma3nPictureSpec) -> Gemma3nPictures:
    settings = read_settings(folder)
    require(settings, "do_resize", True)
    side = side_of(settings, "size", SIDE)
    step = spec.net.side_step
    if side % step or not step <= side <= SIDE:
        raise BadConfig(
            f"pictures are resized to {side} x {side} pixels; the encoder reads a multiple of "
            f"{step} up to {SIDE}"
        )
    looks = read_looks(settings, filter=BICUBIC)
    return Gemma3nPictures(looks, side, spec, special_tokens(folder))


def _sounds(folder: Path, spec: Gemma3nSoundSpec) -> Gemma3nSounds:
    written = read_extractor(folder)
    require(written, "preemphasis_htk_flavor", True)
    found = read_loudness({**USUAL_LOUDNESS, **written})
    if found.num_bands != spec.num_bands:
        raise BadConfig(
            f"the encoder of sounds reads {spec.num_bands} bands; its feature extractor makes "
            f"{found.num_bands}"
        )
    return Gemma3nSounds(found, spec, special_tokens(folder))
