"""Resamples sounds with a polyphase filter in numpy: a sinc with a Kaiser window.

With N the half of the lower of both rates: frequencies below 88 % of N stay as they are, those
above N are attenuated by at least 100 dB.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from weft.arrays import FloatArray

ZEROS = 64  # zero crossings of the sinc on each side of its middle
CUTOFF = 0.94  # frequency with half of its amplitude left, as a fraction of half the lower rate
BETA = 12.0  # shape of the Kaiser window
BLOCK = 1 << 20  # numbers that a product copies at once
PHASES = 256  # phases whose filters are computed at once
# The right half of the window, for linear interpolation between these places.
PLACES = np.linspace(0.0, 1.0, 1 << 14)
WINDOW = np.i0(BETA * np.sqrt(1 - PLACES**2)) / np.i0(BETA)


def resample(samples: FloatArray, rate: int, wanted: int) -> FloatArray:
    """Samples [n] at `rate` per second -> [ceil(n * wanted / rate)] at `wanted` per second.

    The first samples of both have the same time. Before and after the sound there is silence.
    """
    if rate == wanted or not len(samples):
        return samples
    divisor = math.gcd(rate, wanted)
    up = wanted // divisor
    down = rate // divisor
    # The position of output i is i * down / up, in input samples. Outputs i, i + up, i + 2 * up ...
    # have the same position between two samples, so they share a filter: a phase.
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
    """The filters of outputs at these distances [n] after an input sample: [n, 2 * half]. A filter
    reads `half` samples up to and with that sample, and `half` samples after it."""
    distance = fractions[:, None] + np.arange(half - 1, -half - 1, -1)
    window = np.interp(np.abs(distance) / half, PLACES, WINDOW)
    taps = np.sinc(cutoff * distance) * window
    taps /= taps.sum(1, keepdims=True)  # so that a constant input stays constant
    return taps.astype(np.float32)


def _filtered(windows: FloatArray, taps: FloatArray, outputs: FloatArray) -> None:
    """outputs [n] = windows [n or more, taps] @ taps, in blocks: the windows overlap in memory, and
    a product copies them."""
    step = max(1, BLOCK // len(taps))
    for start in range(0, len(outputs), step):
        stop = min(start + step, len(outputs))
        outputs[start:stop] = windows[start:stop] @ taps
