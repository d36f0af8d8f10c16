"""Sounds at another rate, by a polyphase filter in numpy: a sinc in a Kaiser window.

What lies below 88 % of half of the lower of both rates stays as it is; what lies above that half is
at least 100 dB below what it was.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from weft.arrays import FloatArray

ZEROS = 64  # zero crossings of the sinc on each side of its middle
CUTOFF = 0.94  # where half is left, as a part of half of the lower rate
BETA = 12.0  # of the Kaiser window
BLOCK = 1 << 20  # numbers of the sound and of filters that are laid out at once
PHASES = 256  # whose filters are computed at once
# The right half of the window; between these places it is as good as straight.
PLACES = np.linspace(0.0, 1.0, 1 << 14)
WINDOW = np.i0(BETA * np.sqrt(1 - PLACES**2)) / np.i0(BETA)


def resample(samples: FloatArray, rate: int, wanted: int) -> FloatArray:
    """Samples [n] at `rate` a second -> [ceil(n wanted / rate)] at `wanted` a second; the first of
    both is the same moment. Outside of the sound there is silence.
    """
    if rate == wanted or not len(samples):
        return samples
    divisor = math.gcd(rate, wanted)
    up = wanted // divisor
    down = rate // divisor
    # In samples of the sound, output number i lies at i down / up. Outputs i, i + up, i + 2 up ..
    # lie at the same place between two samples, so they have one filter, a phase.
    num_outputs = -(-len(samples) * up // down)
    scale = min(1.0, wanted / rate)
    half = math.ceil(ZEROS / scale)
    windows = sliding_window_view(np.pad(samples, (half - 1, half)), 2 * half)
    outputs = np.empty(num_outputs, np.float32)
    num_phases = min(up, num_outputs)
    for first in range(0, num_phases, PHASES):
        phases = np.arange(first, min(first + PHASES, num_phases))
        filters = _filters(phases * down % up / up, half, scale * CUTOFF)
        for phase, taps in zip(phases.tolist(), filters, strict=True):
            begin = phase * down // up
            _filtered(windows[begin::down], taps, outputs[phase::up])
    return outputs


def _filters(fractions: NDArray[np.float64], half: int, cutoff: float) -> FloatArray:
    """The filters of outputs that lie this far behind a sample: [n] -> [n, 2 half]. A filter reads
    `half` samples up to that one, and `half` behind it."""
    distance = fractions[:, None] + np.arange(half - 1, -half - 1, -1)
    window = np.interp(np.abs(distance) / half, PLACES, WINDOW)
    taps = np.sinc(cutoff * distance) * window
    taps /= taps.sum(1, keepdims=True)  # so that a constant stays itself
    return taps.astype(np.float32)


def _filtered(windows: FloatArray, taps: FloatArray, outputs: FloatArray) -> None:
    """outputs [n] = windows [n or more, taps] times taps; the windows overlap in memory, and a
    product lays them out."""
    step = max(1, BLOCK // len(taps))
    for start in range(0, len(outputs), step):
        stop = min(start + step, len(outputs))
        outputs[start:stop] = windows[start:stop] @ taps
