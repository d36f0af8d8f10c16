"""The order of waiting requests."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

POLICIES = ("fcfs", "lpm", "shortest-prefill-first", "hrrn")


def _policies(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[str]:
    return POLICIES


POLICY = SettingAxis("schedule_policy", _policies, is_live=True)
