"""The sounds of Gemma 4, prepared for its encoder: the logarithm of loudness in bands on the scale
of HTK, 100 times a second, without knowledge of what follows a frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from weft.arrays import FloatArray
from weft.config.config_json import get, number, require, size
from weft.config.model_errors import BadConfig
from weft.config.vision.gemma4_sound import MAX_TOKENS, Gemma4SoundSpec
from weft.config.vision.gemma4_unified import WaveSpec
from weft.json_types import JsonMapping
from weft.messages.media import MediaKind
from weft.text.media.gemma3 import special_tokens
from weft.text.media.mel import FRAMES_AT_ONCE, MAX_RATE, MAX_WINDOW, Doubles
from weft.text.media.processor import MediaPart, PreparedMedia, SoundsAlone, require_sound_length
from weft.text.media.processor_files import read_extractor

# The default tokens, for a tokenizer that does not name them.
BEGIN = "<|audio>"
SOUND = "<|audio|>"
END = "<audio|>"
FRAMES_OF_TOKEN = 4

# HTK's scale: pitches for each factor of 10 beyond this frequency.
_PITCHES = 2_595
_BREAK_HZ = 700


class LoudnessSpec(NamedTuple):
    """The settings of a Gemma4AudioFeatureExtractor, or of a Gemma3nAudioFeatureExtractor."""

    num_bands: int
    rate: int  # samples a second
    window: int  # samples of a frame
    hop: int  # samples from one frame to the next
    num_points: int  # of the transform
    lowest: float  # edges of the bands, in Hz
    highest: float
    floor: float  # is added to what the logarithm is taken of; in Gemma 3n, the least of that
    factor: float  # of samples
    emphasis: float  # share of the sample before each sample that is subtracted
    mean: Doubles  # [num_bands] is subtracted
    deviation: Doubles  # [num_bands] divides

    @property
    def max_samples(self) -> int:
        return MAX_TOKENS * FRAMES_OF_TOKEN * self.hop


def read_loudness(extractor: JsonMapping) -> LoudnessSpec:
    """Raises ModelError."""
    require(extractor, "dither", 0, 0.0)  # dither is random noise: results would differ
    num_bands = size(extractor, "feature_size", 128)
    rate = size(extractor, "sampling_rate", 16_000)
    window = round(rate * number(extractor, "frame_length_ms", 20.0, above=0.0) / 1_000)
    hop = round(rate * number(extractor, "hop_length_ms", 10.0, above=0.0) / 1_000)
    if rate > MAX_RATE or not 0 < hop <= window <= MAX_WINDOW:
        raise BadConfig(
            f"the feature extractor has {rate:,} samples a second, and frames of {window:,} every "
            f"{hop:,}: at most {MAX_RATE:,} are allowed, and at most as many from a frame to the "
            "next as a frame has"
        )
    num_points = 2 ** math.ceil(math.log2(window))
    if get(extractor, "fft_overdrive", bool, False):
        num_points *= 2
    deviation = _of_bands(extractor, "per_bin_stddev", num_bands, 1.0)
    if not deviation.all():
        raise BadConfig("per_bin_stddev has a 0, which divides")
    lowest = number(extractor, "min_frequency", 0.0, low=0.0)
    return LoudnessSpec(
        num_bands=num_bands,
        rate=rate,
        window=window,
        hop=hop,
        num_points=num_points,
        lowest=lowest,
        highest=number(extractor, "max_frequency", 8_000.0, above=lowest),
        floor=number(extractor, "mel_floor", 1e-3, above=0.0),
        factor=number(extractor, "input_scale_factor", 1.0),
        emphasis=number(extractor, "preemphasis", 0.0),
        mean=_of_bands(extractor, "per_bin_mean", num_bands, 0.0),
        deviation=deviation,
    )


def _of_bands(extractor: JsonMapping, key: str, num_bands: int, default: float) -> Doubles:
    values = extractor.get(key)
    if values is None:
        return np.full(num_bands, default)
    try:
        found = np.array(values, np.float64).reshape(num_bands)
    except (TypeError, ValueError, OverflowError):
        raise BadConfig(f"{key} must have {num_bands} numbers, one for each band") from None
    if not np.isfinite(found).all():
        raise BadConfig(f"{key} has numbers that are not finite")
    return found


def bands_of(spec: LoudnessSpec) -> Doubles:
    """The weight of each frequency of the transform in each band: [frequencies, bands]. A band is a
    triangle between the middles of its neighbours, of height 1."""
    pitches = np.linspace(
        _pitch(spec.lowest),
        _pitch(spec.highest),
        spec.num_bands + 2,
    )
    edges = _BREAK_HZ * (10 ** (pitches / _PITCHES) - 1)
    num_frequencies = spec.num_points // 2 + 1
    points = np.linspace(0, spec.rate // 2, num_frequencies)
    points = points[:, None]
    widths = np.diff(edges)
    rise = (points - edges[:-2]) / widths[:-1]
    fall = (edges[2:] - points) / widths[1:]
    bands: Doubles = np.maximum(0.0, np.minimum(rise, fall))
    return bands


def _pitch(hz: float) -> float:
    return _PITCHES * math.log10(1 + hz / _BREAK_HZ)


def loudness(samples: FloatArray, spec: LoudnessSpec, bands: Doubles) -> FloatArray:
    """[frames, bands] of the frames that lie within a sound [n]; the first one has silence in its
    first half."""
    # A frame also needs the sample that follows it.
    half = spec.window // 2
    padded = np.pad(samples * spec.factor, (half, 0))
    last_start = len(padded) - spec.window - 1
    if last_start < 0:
        return np.empty((0, spec.num_bands), np.float32)
    num_frames = last_start // spec.hop + 1
    windows = sliding_window_view(padded, spec.window)
    frames = windows[:: spec.hop][:num_frames]
    shape = hann(spec.window)
    pieces = []
    for begin in range(0, num_frames, FRAMES_AT_ONCE):
        some = frames[begin : begin + FRAMES_AT_ONCE]
        transformed = np.fft.rfft(some * shape, n=spec.num_points)
        sizes = np.abs(transformed) @ bands
        pieces.append(np.log(sizes + spec.floor))
    found = (np.concatenate(pieces) - spec.mean) / spec.deviation
    return found.astype(np.float32)


def hann(num: int, *, kind: type = np.float64) -> FloatArray:
    """The factors of the samples of a frame, computed in numbers of this kind."""
    angles = 2 * np.pi * np.arange(num, dtype=kind) / num
    shape = 0.5 * (1 - np.cos(angles))
    return shape.astype(np.float32)


class Gemma4Sounds(SoundsAlone):
    """The `MediaProcessor` of Gemma 4's sounds. Values are [frames, bands]."""

    def __init__(self, spec: LoudnessSpec, names: Mapping[str, str]) -> None:
        """`names`: the special tokens. Raises BadConfig."""
        if spec.emphasis:
            raise BadConfig(f"preemphasis is {spec.emphasis:g}; only 0 is supported")
        sound = names.get("audio_token", SOUND)
        self.marks: Mapping[MediaKind, str] = {"audio": sound}
        self.placeholders: Mapping[MediaKind, str] = {"audio": sound}
        self.spec = spec
        self._bands = bands_of(spec)
        self._begin = names.get("boa_token", BEGIN)
        self._end = names.get("eoa_token", END)

    @property
    def audio_rate(self) -> int:
        return self.spec.rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        spec = self.spec
        require_sound_length(len(samples), spec.max_samples, spec.rate)
        values = loudness(samples, spec, self._bands)
        if not len(values):
            least = spec.window - spec.window // 2 + 1
            raise ValueError(
                f"the sound is too short: its length at {spec.rate:,} samples a second is "
                f"{len(samples):,}; at least {least:,} samples are needed"
            )
        length = -(-len(values) // FRAMES_OF_TOKEN)
        part = MediaPart(kind="audio", length=length, grid=None, values=values)
        text = f"{self._begin}{self.placeholders['audio'] * length}{self._end}"
        return PreparedMedia(text, (part,))


class Gemma4Waves(SoundsAlone):
    """The `MediaProcessor` of the unified Gemma 4's sounds. Values are [tokens, samples]."""

    def __init__(self, rate: int, num_samples: int, names: Mapping[str, str]) -> None:
        """`num_samples`: of a token. `names`: the special tokens."""
        sound = names.get("audio_token", SOUND)
        self.marks: Mapping[MediaKind, str] = {"audio": sound}
        self.placeholders: Mapping[MediaKind, str] = {"audio": sound}
        self.num_samples = num_samples
        self._rate = rate
        self._begin = names.get("boa_token", BEGIN)
        self._end = names.get("eoa_token", END)

    @property
    def audio_rate(self) -> int:
        return self._rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        longest = MAX_TOKENS * self.num_samples
        if not 0 < len(samples) <= longest:
            raise ValueError(
                f"the sound lasts {len(samples) / self._rate:.1f} s; "
                f"the model takes up to {longest / self._rate:g} s, and at least one sample"
            )
        silence = -len(samples) % self.num_samples
        values = np.pad(samples, (0, silence)).astype(np.float32).reshape(-1, self.num_samples)
        part = MediaPart(kind="audio", length=len(values), grid=None, values=values)
        text = f"{self._begin}{self.placeholders['audio'] * part.length}{self._end}"
        return PreparedMedia(text, (part,))


def make_waves(folder: Path, encoder: WaveSpec) -> Gemma4Waves:
    """The processor of the sounds of a unified model in a folder. Raises ModelError."""
    extractor = read_extractor(folder)
    num_samples = size(extractor, "audio_samples_per_token", 640)
    if num_samples != encoder.num_samples:
        raise BadConfig(
            f"the model reads {encoder.num_samples} samples for a token of a sound; its feature "
            f"extractor makes {num_samples}"
        )
    rate = size(extractor, "sampling_rate", 16_000)
    if rate > MAX_RATE:
        raise BadConfig(
            f"the feature extractor has {rate:,} samples a second; at most {MAX_RATE:,} are allowed"
        )
    return Gemma4Waves(rate, num_samples, special_tokens(folder))


def make_sounds(folder: Path, encoder: Gemma4SoundSpec) -> Gemma4Sounds:
    """The processor of the sounds of the model in a folder. Raises ModelError."""
    spec = read_loudness(read_extractor(folder))
    if spec.num_bands != encoder.num_bands:
        raise BadConfig(
            f"the encoder of sounds reads {encoder.num_bands} bands; its feature extractor makes "
            f"{spec.num_bands}"
        )
    return Gemma4Sounds(spec, special_tokens(folder))
