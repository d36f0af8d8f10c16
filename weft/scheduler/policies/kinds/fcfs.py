"""First come, first served."""

from __future__ import annotations

from weft.scheduler.policies.lanes.lanes import LastingKey
from weft.scheduler.policies.protocol import Policy


class Fcfs(Policy):
    ages = False

    def lasting_keys(self) -> tuple[LastingKey, ...]:
        return ()


POLICY = Fcfs
