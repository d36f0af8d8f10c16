"""Whether running requests decode in the same step as a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings


def _both(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[bool]:
    # Where a prefill is split by layers, steps are not mixed.
    return () if settings.split_prefill_layers else (True, False)


MIXED = SettingAxis("mixed_chunk", _both, is_live=True)
