"""The cost of a step of the draft model, learnt online.

    seconds = step + pass · passes + token · tokens

Knows nothing of requests. Uses plain Python floats, so that a replay computes the same numbers.
"""

from __future__ import annotations

import math

from weft.plan.step import Drafting, Plan
from weft.scheduler.pace.step_cost import MIN_STEP_S, NormalEquations, solve_not_negative

FORGET = 0.95
TOKENS_UNIT = 32.0  # so that the terms have similar sizes
# The first steps touch memory and build programs, so their times say nothing of later steps.
NUM_IGNORED = 2
DRAFT_REFIT_STEPS = 16  # measured steps between two fits
NUM_TRIED = 6  # measured steps after which the cost is known


class DraftCost:
    """`step_s`: seconds per step. `pass_s`: per pass of a step. `token_s`: per token of a pass."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.pass_s = 0.0
        self.token_s = 0.0
        self.num_seen = 0  # steps
        self._equations = NormalEquations(3, FORGET)

    @property
    def is_known(self) -> bool:
        return self.num_seen >= NUM_TRIED

    def seconds(self, num_tokens: int, num_passes: int) -> float:
        """Seconds of a step that computes `num_tokens` tokens, drafts included; 0 until it is
        known."""
        return self.step_s + self.pass_s * num_passes + self.token_s * num_tokens

    def observe(self, plan: Plan, drafting: Drafting, seconds: float) -> None:
        """A step has taken `seconds`."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self.num_seen += 1
        if self.num_seen <= NUM_IGNORED:
            return
        num_tokens, num_passes = size_of(plan, drafting)
        row = (1.0, float(num_passes), num_tokens / TOKENS_UNIT)
        self._equations.add(row, seconds, 1 / max(seconds, MIN_STEP_S))
        if self.num_seen > NUM_TRIED and self.num_seen % DRAFT_REFIT_STEPS:
            return
        solution = solve_not_negative(self._equations.matrix, self._equations.vector)
        self.step_s, self.pass_s, per_unit = solution
        self.token_s = per_unit / TOKENS_UNIT


def size_of(plan: Plan, drafting: Drafting) -> tuple[int, int]:
    """The tokens and the passes of a step of the draft model."""
    num_passes = max(int(drafting.counts.max(initial=0)), 1)
    return plan.num_tokens + len(drafting.slots), num_passes
