"""What background requests need, made when the first one comes."""

from __future__ import annotations

from collections.abc import Sequence

from weft.arrays import IntArray
from weft.scheduler.background.turns import BackgroundTurns
from weft.scheduler.pace.room import StepRoom
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.protocol import Policy, PolicyContext
from weft.scheduler.request import Request


class BackgroundOpening:
    """Makes the order of the line of background requests, and lets their rows take turns."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._turns: BackgroundTurns | None = None

    def open(self) -> Policy:
        """The policy of a new line."""
        context = self._context
        settings = context.settings
        if self._turns is None:
            self._turns = BackgroundTurns(context.pace)
            # First: pipeline stages then share the rows that are left.
            context.columns.turns.insert(0, self._turns)
            if context.pace is not None:
                context.pace.room = StepRoom(settings.background_slowdown)
        return build_policy(settings.background_policy, context)

    def beside(self, rows: IntArray, prompts: Sequence[Request]) -> IntArray:
        """Those of the decoding `rows` [n] that take part in a step with these pieces of prompts of
        online requests."""
        if self._turns is None:
            return rows
        return self._turns.beside(self._context.columns, rows, prompts)
