"""Leaps of a simulated engine over uniform decode: the same decisions, times and state as step by
step, for a fraction of the work. Pauses without work need no leap: the clock jumps over them.

    arrival ─▶ prefill ─▶ decode decode decode ... decode ─▶ a request has ended, or one arrives
                          '---------- one leap --------'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.arrays import LongArray
from weft.engine.engine import Engine
from weft.messages.replies import Finish
from weft.scheduler.pace.step_cost import StepLoad
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock
from weft.sim.uniform import RanStep, UniformDecodes, UniformRows


class Leapt(NamedTuple):
    """Steps that were made at once. Each gave a token to each of the requests, and some of them
    ended with the last one."""

    ids: LongArray  # [n]
    ended_s: NDArray[np.float64]  # [steps]
    finished: Sequence[Finish]


class Foreseen(NamedTuple):
    """The steps that an engine will make if no message comes before."""

    rows: UniformRows
    steps: Sequence[RanStep]  # at least one


class EngineLeaps:
    """Makes steps of one engine at once. The engine plans no step while another one runs."""

    def __init__(
        self, engine: Engine, runner: CostRunner, clock: VirtualClock, lengths: TrueLengths
    ) -> None:
        self._core = engine.core
        self._steps = UniformDecodes(engine.scheduler)
        self._runner = runner
        self._clock = clock
        self._lengths = lengths

    def leap(self, until_s: float) -> Leapt | None:
        """Make steps up to this time; None if the next step is another one."""
        foreseen = self.foresee(until_s)
        if foreseen is None:
            return None
        return self.make(foreseen)

    def foresee(self, until_s: float = math.inf) -> Foreseen | None:
        """The steps up to this time, or to the first end; None if the next step is another one.
        They hold until a message comes."""
        core = self._core
        # A deadline is looked at before each step.
        until_s = min(until_s, core.scheduler.limits.deadlines.next_s)
        if self._clock.now >= until_s or not core.is_plain:
            return None
        ahead = self._steps.ahead()
        if ahead is None:
            return None
        to_end = self._lengths.steps_to_end(ahead.facts.sampling.seeds, ahead.known_len)
        num_steps = min(ahead.num_steps, to_end)
        num_rows = len(ahead.rows)
        context = int(ahead.known_len.sum())
        reads = range(context, context + num_steps * num_rows, num_rows)
        loads = (StepLoad(num_rows, read, read, num_rows) for read in reads)
        steps = self._runner.foresee(loads, until_s)
        return Foreseen(ahead, steps) if steps else None

    def make(self, foreseen: Foreseen, until_s: float = math.inf) -> Leapt | None:
        """Make those of the foreseen steps that begin before this time; None if there are none."""
        ahead, steps = foreseen
        if steps[-1].began_s >= until_s:
            steps = [step for step in steps if step.began_s < until_s]
            if not steps:
                return None
        core = self._core
        clock = self._clock
        self._runner.decode(len(ahead.rows), steps)
        self._steps.make(ahead, steps)
        numbers = ahead.facts.sampling.seeds
        tokens = self._lengths.ahead(numbers, ahead.known_len, len(steps))
        self._steps.finish(ahead, tokens, steps)
        last = steps[-1]
        core.loop.skipped(len(steps), last.began_s, last.ended_s)
        finished = self._finished()
        if not core.has_work:
            for service in core.hooks.after_step:
                service.after_step(clock.now)  # the books are audited when nothing runs
        ended_s = np.array([step.ended_s for step in steps])
        return Leapt(ahead.facts.ids, ended_s, finished)

    def _finished(self) -> Sequence[Finish]:
        output = self._core.scheduler.outbox.take_output()
        return () if output is None else output.finished
