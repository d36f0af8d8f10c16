"""What background requests need, made when the first one comes."""

from __future__ import annotations

from weft.scheduler.background.turns import BackgroundTurns
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.protocol import Policy, PolicyContext


class BackgroundOpening:
    """Makes the order of the line of background requests, and lets their rows take turns."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._turns: BackgroundTurns | None = None

    def open(self) -> Policy:
        """The policy of a new line."""
        settings = self._context.settings
        if self._turns is None:
            self._turns = BackgroundTurns(self._context.pace, settings.background_slowdown)
            # First: pipeline stages then share the rows that are left.
            self._context.columns.turns.insert(0, self._turns)
        return build_policy(settings.background_policy, self._context)
