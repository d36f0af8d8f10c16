"""The longest piece of a prompt in one step: short pieces keep streams smooth, long ones cost
less."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

SIZES = (64, 128, 256, 512, 1_024, 2_048)


def _sizes(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[int]:
    return [size for size in SIZES if settings.page_size <= size < settings.context_length]


CHUNK = SettingAxis("chunked_prefill_size", _sizes, is_live=True)
