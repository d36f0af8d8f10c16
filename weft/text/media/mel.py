"""Log-mel spectrograms, the input of encoders like Whisper's: the loudness of a sound in bands of
frequencies, 100 times a second.

Source: Radford et al., arXiv:2212.04356, section 2.2; the bands are those of Slaney's Auditory
Toolbox.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from weft.arrays import FloatArray

Doubles = NDArray[np.float64]

FLOOR = 1e-10  # lower powers count as this one
RANGE = 8.0  # powers of ten below the loudest value; lower values are raised to this limit
FRAMES_AT_ONCE = 3_000  # so that a long sound takes no more memory than a short one
HIGHEST = 8000.0  # upper edge of the highest band, in Hz

# Slaney's scale: linear below 1000 Hz, then logarithmic, 27 bands for each factor of 6.4.
_LINEAR_HZ = 200 / 3
_BREAK_HZ = 1000.0
_BREAK = _BREAK_HZ / _LINEAR_HZ
_LOG_STEP = math.log(6.4) / 27


class MelSpec(NamedTuple):
    num_bands: int
    rate: int  # samples a second
    hop: int  # samples from one frame to the next
    window: int  # samples that a frame is computed from
    num_frames: int  # frames of the longest sound

    @property
    def max_samples(self) -> int:
        return self.num_frames * self.hop


def mel_bands(spec: MelSpec) -> Doubles:
    """The weight of each frequency of the transform in each band: [frequencies, bands]. A band is a
    triangle between the middles of its neighbours, of area 1: its height is 2 / (width in Hz)."""
    edges = _hz(np.linspace(0.0, _pitch(HIGHEST), spec.num_bands + 2))
    frequencies = np.linspace(0.0, spec.rate // 2, 1 + spec.window // 2)
    lows = edges[:-2]
    middles = edges[1:-1]
    highs = edges[2:]
    points = frequencies[:, None]
    rise = (points - lows) / (middles - lows)
    fall = (highs - points) / (highs - middles)
    triangles = np.maximum(0.0, np.minimum(rise, fall))
    bands: Doubles = triangles * (2 / (highs - lows))
    return bands


def _pitch(hz: float) -> float:
    """The pitch on Slaney's scale of a frequency above the linear part."""
    return _BREAK + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _hz(pitch: Doubles) -> Doubles:
    logarithmic = _BREAK_HZ * np.exp(_LOG_STEP * (pitch - _BREAK))
    return np.where(pitch < _BREAK, _LINEAR_HZ * pitch, logarithmic)


def log_mel(samples: FloatArray, spec: MelSpec, bands: Doubles, num_frames: int) -> FloatArray:
    """The first `num_frames` frames of a sound [n]: [bands, num_frames].

    They are equal to those of the sound padded with silence to the longest length. A frame covers
    the samples around its time; before the first sample, and after the last of the longest length,
    the sound is mirrored. The maximum is taken over all frames that the sound reaches.
    """
    half = spec.window // 2
    # All frames that the sound reaches count for the maximum, also after `num_frames`.
    reached = min(spec.num_frames, max(num_frames, (len(samples) + half) // spec.hop + 1))
    silent = np.zeros(max(spec.max_samples, len(samples)), np.float64)
    silent[: len(samples)] = samples
    padded = np.pad(silent, half, mode="reflect")
    frames = sliding_window_view(padded, spec.window)[:: spec.hop][:reached]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(spec.window) / spec.window)
    pieces = []
    for begin in range(0, len(frames), FRAMES_AT_ONCE):
        power = np.abs(np.fft.rfft(frames[begin : begin + FRAMES_AT_ONCE] * hann)) ** 2
        pieces.append(np.log10(np.maximum(power @ bands, FLOOR)))
    loudness = np.concatenate(pieces)
    loudness = np.maximum(loudness, loudness.max() - RANGE)
    return np.ascontiguousarray((loudness[:num_frames].T + 4) / 4, np.float32)
