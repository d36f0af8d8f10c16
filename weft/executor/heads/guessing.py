"""Steps in which tokens are guessed, one after the other, by a head or a draft model.

Each pass is an ordinary step of what guesses: it is computed by the same functions, and draws with
the noise of the token that it guesses. `GuessPasses` runs one after the other; the CPU kernels run
all of them in one call (`CpuFusedSteps.guess`), because between the passes of a small model Python
would take more time than the passes. This module knows no request, and does not know what becomes
of the guesses.

    plan       | known | known | d1 | d2 | d3 |
    1st pass   |_______________|                 draws d1
    2nd pass                   |____|            draws d2
    3rd pass                        |____|       draws d3
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.executor.device import DeviceOutput, HostResult
from weft.executor.heads.states import HiddenPool
from weft.executor.runner import Pass, Run
from weft.plan.step import Drafting, ForwardMode, Plan, Result


class GuessRunner(Protocol):
    """Draws the tokens of plans for a draft model."""

    def guess(self, plan: Plan, drafting: Drafting) -> IntArray:
        """The guessed tokens [sum of counts] of a plan with this `drafting`."""
        ...


class HeadPass(Pass):
    """Lets a head compute its plans. Its memory is that of the model, and is released with it."""

    name = "head"

    def __init__(self, guesses: GuessRunner, states: HiddenPool | None = None) -> None:
        """`states`: what the head reads, for who records it; None: of ranks."""
        self._guesses = guesses
        self.states = states

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.drafting is None:
            return then(plan)
        return HostResult(Result(self._guesses.guess(plan, plan.drafting)))


class GuessPasses:
    """The `GuessRunner` of any draft model: a step of it for each token. `later` computes the steps
    after the first one, if another does."""

    def __init__(self, draft: Run, later: Run | None = None) -> None:
        self._draft = draft
        self._later = later or draft

    def guess(self, plan: Plan, drafting: Drafting) -> IntArray:
        counts = drafting.counts
        begins = np.cumsum(counts) - counts
        drawn: IntArray = np.zeros(int(counts.sum()), np.int32)
        draws = counts > 0
        of_first = begins[draws]
        first = replace(
            plan,
            mode=ForwardMode.MIXED,
            samples=draws,
            sampling=plan.sampling.take(of_first),
            drafting=None,
        )
        drawn[of_first] = self._draft(first).result().tokens
        chain = _Chain(plan, drafting.slots, begins, np.cumsum(counts - draws) - (counts - draws))
        for i in range(1, int(counts.max(initial=0))):
            goes_on = np.flatnonzero(counts > i)
            step = chain.step(
                goes_on,
                i,
                drawn,
            )
            drawn[begins[goes_on] + i] = self._later(step).result().tokens
        return drawn


class _Chain(NamedTuple):
    """The passes after the first one."""

    plan: Plan
    slots: IntArray  # of drafts
    begins: LongArray  # [R] of each request's drafts
    slot_begins: LongArray  # [R] of their slots

    def step(self, which: LongArray, i: int, drawn: IntArray) -> Plan:
        """The step that computes draft i of some requests, counted from 1, and draws the next."""
        plan = self.plan
        index = self.begins[which] + i
        ones = np.ones(len(which), np.int32)
        return Plan(
            step=plan.step,
            mode=ForwardMode.DECODE,
            rows=plan.rows[which],
            starts=(plan.starts + plan.lens)[which] + np.int32(i - 1),
            lens=ones,
            tokens=drawn[index - 1],
            slots=self.slots[self.slot_begins[which] + (i - 1)],
            samples=ones.astype(np.bool_),
            sampling=plan.sampling.take(index),
        )
