"""What background requests need, made when the first one comes."""

from __future__ import annotations

from weft.scheduler.background.turns import BackgroundTurns
from weft.scheduler.pace.room import StepRoom
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.protocol import Policy, PolicyContext


class BackgroundOpening:
    """Makes the order of the line of background requests, and lets their rows take turns."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self.turns: BackgroundTurns | None = None  # once there was a background request

    def open(self) -> Policy:
        """The policy of a new line."""
        context = self._context
        settings = context.settings
        if self.turns is None:
            self.turns = BackgroundTurns(context.pace)
            # First: pipeline stages then share the rows that are left.
            context.columns.turns.insert(0, self.turns)
            context.pace.room = StepRoom(settings.background_slowdown)
        return build_policy(settings.background_policy, context)
