"""How much memory is kept for the outputs of running requests before another one is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

VALUES = (0.5, 1.0, 1.5)


def _values(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[float]:
    return VALUES


ADMISSION = SettingAxis("schedule_conservativeness", _values, is_live=True)
