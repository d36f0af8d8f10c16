"""First come, first served."""

from __future__ import annotations

from weft.scheduler.policies.lanes.lanes import StableKey
from weft.scheduler.policies.protocol import Policy


class Fcfs(Policy):
    ages = False

    def stable_keys(self) -> tuple[StableKey, ...]:
        return ()


POLICY = Fcfs
