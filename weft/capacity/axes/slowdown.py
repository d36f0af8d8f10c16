"""How much prompts may slow down the streams that run."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

FACTORS = (1.15, 1.3, 1.5, 2.0, 3.0, 5.0, -1.0)  # -1: without limit


def _factors(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[float]:
    return FACTORS


SLOWDOWN = SettingAxis("max_slowdown", _factors)
