"""How fast a machine was, moment by moment, from steps that it ran; and how long other steps would
have taken then.

    recorded    |-- step --|- step -|      |---- step ----|
    speed       |   0.9    |  1.1   |  1   |     0.5      |    usual time / time taken
    simulated    |--- step ----|                               until it got its own usual time

So what held up the machine is where it was in time, for as long as then, whether few long steps
run there or many short ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_S = 1e-9
NUM_PARTS = 10


class Stretch(NamedTuple):
    """A step that ran, in seconds: since when, until when, and how long one like it usually
    takes."""

    began_s: float
    ended_s: float
    usual_s: float


class SpeedSpread(NamedTuple):
    """Of `NUM_PARTS` parts of a run with as much work each: how many times as fast as in the mean
    the machine was in the slowest and in the fastest of them."""

    slow: float  # at most 1
    fast: float


class MachineSpeed:
    """`stretches` follow each other; between them, and where there are none, the speed is the usual
    one. Behind the last one they begin anew."""

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
            # Of a step that began before the first time, the part behind it counts.
            part = (one.ended_s - began_s) / (one.ended_s - one.began_s)
            worth.append(worth[-1] + max(part * one.usual_s, LEAST_S))
            times.append(one.ended_s)
        if len(times) == 1:
            times.append(1.0)
            worth.append(1.0)
        self._times: NDArray[np.float64] = np.array(times)
        self._worth: NDArray[np.float64] = np.array(worth)

    def seconds(self, usual_s: float, began_s: float) -> float:
        """How long a step takes that begins then, and usually takes `usual_s`."""
        period_s = float(self._times[-1])
        whole = float(self._worth[-1])
        since_s = began_s % period_s
        done = float(np.interp(since_s, self._times, self._worth)) + usual_s / self._factor
        num_rounds, rest = divmod(done, whole)
        until_s = num_rounds * period_s + float(np.interp(rest, self._worth, self._times))
        return max(until_s - since_s, 0.0)

    def times(self, factor: float) -> MachineSpeed:
        """The same machine, at each moment so many times as fast."""
        other = copy.copy(self)
        other._factor = self._factor * factor
        return other

    def spread(self) -> SpeedSpread:
        """How much faster or slower it was for a while than in the mean."""
        edges = np.linspace(0.0, self._worth[-1], NUM_PARTS + 1)
        took_s = np.diff(np.interp(edges, self._worth, self._times))
        mean_s = float(took_s.mean())
        slow = mean_s / float(took_s.max())
        fast = mean_s / max(float(took_s.min()), LEAST_S)
        return SpeedSpread(slow, fast)
