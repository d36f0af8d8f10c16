"""First come, first served."""

from __future__ import annotations

from weft.scheduler.policy import Policy


class Fcfs(Policy):
    ages = False


POLICY = Fcfs
