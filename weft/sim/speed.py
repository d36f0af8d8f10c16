"""The speed of a machine over time, from steps that it ran; and the durations that other steps
would have had then.

    recorded    |-- step --|- step -|      |---- step ----|
    speed       |   0.9    |  1.1   |  1   |     0.5      |    usual time / time taken
    simulated    |--- step ----|                               until it got its own usual time

So a slowdown of the machine stays at its place in time, with its duration, for few long steps as
well as for many short ones.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_S = 1e-9
NUM_PARTS = 10


class Stretch(NamedTuple):
    """A step that ran: its begin, its end, and the usual duration of such a step, in seconds."""

    began_s: float
    ended_s: float
    usual_s: float


class SpeedSpread(NamedTuple):
    """A run is split into `NUM_PARTS` parts of equal work. Speed of the machine, relative to the
    mean, in the slowest and in the fastest part."""

    slow: float  # at most 1
    fast: float


class MachineSpeed:
    """`stretches` are in order of time and do not overlap; between them, and without any, the speed
    is the usual one. After the last one they repeat from the first."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._factor = 1.0
        times = [0.0]
        worth = [0.0]
        for one in stretches:
            began_s = max(one.began_s, times[-1])
            if one.ended_s <= began_s + LEAST_S:
                continue
            if began_s > times[-1]:
                worth.append(worth[-1] + began_s - times[-1])
                times.append(began_s)
            # If a step began before the previous end, only the part after that end counts.
            part = (one.ended_s - began_s) / (one.ended_s - one.began_s)
            worth.append(worth[-1] + max(part * one.usual_s, LEAST_S))
            times.append(one.ended_s)
        if len(times) == 1:
            times.append(1.0)
            worth.append(1.0)
        self._times = times
        self._worth = worth

    def seconds(self, usual_s: float, began_s: float) -> float:
        """The duration of a step that begins at `began_s` and usually takes `usual_s`."""
        period_s = self._times[-1]
        whole = self._worth[-1]
        since_s = began_s % period_s
        done = _between(since_s, self._times, self._worth) + usual_s / self._factor
        num_rounds, rest = divmod(done, whole)
        until_s = num_rounds * period_s + _between(rest, self._worth, self._times)
        return max(until_s - since_s, 0.0)

    def times(self, factor: float) -> MachineSpeed:
        """The same machine, `factor` times as fast at each moment."""
        other = copy.copy(self)
        other._factor = self._factor * factor
        return other

    def spread(self) -> SpeedSpread:
        """The slowest and the fastest part of the run, relative to the mean."""
        edges = np.linspace(0.0, self._worth[-1], NUM_PARTS + 1)
        took_s = np.diff(np.interp(edges, self._worth, self._times))
        mean_s = float(took_s.mean())
        slow = mean_s / float(took_s.max())
        fast = mean_s / max(float(took_s.min()), LEAST_S)
        return SpeedSpread(slow, fast)


def _between(value: float, known: Sequence[float], wanted: Sequence[float]) -> float:
    """`wanted` where `known`, which ascends, is `value`: as `np.interp`, in a tenth of the time."""
    index = min(bisect_right(known, value), len(known) - 1)
    start = known[index - 1]
    share = (value - start) / max(known[index] - start, LEAST_S)
    return wanted[index - 1] + share * (wanted[index] - wanted[index - 1])
