"""A head that is divided between ranks, as its model is.

    rank 0     | pass 1, draws d1 |  | pass 2, draws d2 |  | pass 3 ...
                plan of pass 1 ─┐     plan with d1 ─┐
    others     | its part of it |  | its part of it |

Only rank 0 draws. Ranks that follow learn what was drawn from the plan of the next pass, so here a
chain is one plan for each pass, and not one call of the kernels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.executor.device import DeviceOutput
from weft.executor.heads.guessing import GuessPasses, GuessRunner, HeadPass
from weft.executor.ranks.sender import PlanSender
from weft.executor.runner import DecoderOutput, Pass, Run
from weft.ops.sharding import RankLost
from weft.plan.step import Drafting, ForwardMode, Plan

NO_SLOTS = np.empty(0, np.int32)


class FollowingHead(Pass):
    """Computes this rank's part of each pass that rank 0 sends."""

    name = "head"

    def __init__(self, first: Run, later: Run) -> None:
        self._first = first
        self._later = later

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.drafting is None:
            return then(plan)
        compute = self._later if plan.mode is ForwardMode.DECODE else self._first
        compute(plan)
        return DecoderOutput(None, ())


def head_pass(sender: PlanSender | None, first: Run, later: Run) -> Pass:
    """The pass of a head with this computation of first and later passes, which draws one token for
    each request that samples. `sender`: of rank 0; None: this rank follows."""
    if sender is None:
        return FollowingHead(first, later)
    guesses: GuessRunner = GuessPasses(_led(sender, first), _led(sender, later))
    return HeadPass(guesses)


def _led(sender: PlanSender, compute: Run) -> Run:
    def led(plan: Plan) -> DeviceOutput:
        sender.begin(replace(plan, drafting=one_each(plan)))
        try:
            return compute(plan)
        except RankLost as exc:
            raise sender.followers.explain(exc) from exc

    return led


def one_each(plan: Plan) -> Drafting:
    """A chain of one pass, which draws a token for each request that samples."""
    return Drafting(plan.samples.astype(np.int32), NO_SLOTS)
