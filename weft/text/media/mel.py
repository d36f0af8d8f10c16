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
FRAMES_AT_ONCE = 250  # so that they stay in the cache, and a long sound takes no more memory
# The most samples that a checkpoint may ask for, a second and in a frame.
MAX_RATE = 192_000
MAX_WINDOW = 1 << 16
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


class MelBands:
    """Triangles over the frequencies of the transform, each between the middles of its neighbours
    and of area 1: its height is 2 / (width in Hz).

    Most weights are 0, so the others are kept alone, band after band: a product with all of them
    would be many times the work, and BLAS would share it among threads.
    """

    def __init__(self, spec: MelSpec) -> None:
        edges = _hz(np.linspace(0.0, _pitch(HIGHEST), spec.num_bands + 2))
        frequencies = np.linspace(0.0, spec.rate // 2, 1 + spec.window // 2)
        lows = edges[:-2, None]
        middles = edges[1:-1, None]
        highs = edges[2:, None]
        rise = (frequencies - lows) / (middles - lows)
        fall = (highs - frequencies) / (highs - middles)
        # [bands, frequencies]
        self.weights = np.maximum(0.0, np.minimum(rise, fall)) * (2 / (highs - lows))
        of_band, self._places = self.weights.nonzero()
        self._factors = self.weights[of_band, self._places][:, None]
        # Bands that are narrower than the distance of two frequencies may have none.
        self._bands, self._firsts = np.unique(of_band, return_index=True)

    def of(self, power: Doubles) -> Doubles:
        """The sums of power [frequencies, frames] in each band: [bands, frames]."""
        found = np.zeros((len(self.weights), power.shape[1]))
        weighted = power[self._places] * self._factors
        found[self._bands] = np.add.reduceat(weighted, self._firsts, axis=0)
        return found


def _pitch(hz: float) -> float:
    """The pitch on Slaney's scale of a frequency above the linear part."""
    return _BREAK + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _hz(pitch: Doubles) -> Doubles:
    logarithmic = _BREAK_HZ * np.exp(_LOG_STEP * (pitch - _BREAK))
    return np.where(pitch < _BREAK, _LINEAR_HZ * pitch, logarithmic)


def log_mel(samples: FloatArray, spec: MelSpec, bands: MelBands, num_frames: int) -> FloatArray:
    """The first `num_frames` frames of a sound [n]: [bands, num_frames].

    They are equal to those of the sound padded with silence to the longest length. A frame covers
    the samples around its time; before the first sample, and after the last of the longest length,
    the sound is mirrored. The maximum is taken over all frames that the sound reaches.
    """
    half = spec.window // 2
    # All frames that the sound reaches count for the maximum, also after `num_frames`.
    reached = (len(samples) + half) // spec.hop + 1
    most = min(spec.num_frames, max(num_frames, reached))
    # Frames after those are silent, and not computed.
    heard = min(most, reached)
    length = min(max(spec.max_samples, len(samples)), heard * spec.hop + half)
    silent = np.zeros(length, np.float64)
    silent[: len(samples)] = samples[:length]
    padded = np.pad(silent, half, mode="reflect")
    frames = sliding_window_view(padded, spec.window)[:: spec.hop][:heard]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(spec.window) / spec.window)
    loudness = np.empty((spec.num_bands, heard))
    for begin in range(0, heard, FRAMES_AT_ONCE):
        end = begin + FRAMES_AT_ONCE
        transform = np.fft.rfft(frames[begin:end] * hann).T
        power = bands.of(np.square(transform.real) + np.square(transform.imag))
        loudness[:, begin:end] = np.log10(np.maximum(power, FLOOR))
    least = float(loudness.max()) - RANGE
    silence = (max(math.log10(FLOOR), least) + 4) / 4
    values = np.full((spec.num_bands, num_frames), silence, dtype=np.float32)
    own = loudness[:, :num_frames]
    values[:, : own.shape[1]] = (np.maximum(own, least) + 4) / 4
    return values
