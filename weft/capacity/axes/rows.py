"""The requests that decode together: more share each reading of the weights, and wait longer for
each other."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

NUMBERS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
MOST = 2  # times as many as the machine was measured with: beyond, its cost is a guess


def _numbers(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[int]:
    most = MOST * machine.settings.max_running_requests
    return [number for number in NUMBERS if number <= most]


ROWS = SettingAxis("max_running_requests", _numbers, is_live=True)
