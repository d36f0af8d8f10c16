"""The protocol of an axis, and one for a setting of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from weft.capacity.machine import MeasuredMachine
from weft.scheduler.settings import SchedulerSettings

AxisValue: TypeAlias = str | int | float | bool
# From the machine and the settings so far: the values to try.
Values: TypeAlias = Callable[[MeasuredMachine, SchedulerSettings], Sequence[AxisValue]]


class Axis(Protocol):
    """A setting of a server that the search may choose."""

    @property
    def name(self) -> str:
        """The name of its option: `chunked_prefill_size`."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether it can be changed while a server runs."""
        ...

    def value(self, settings: SchedulerSettings) -> AxisValue: ...

    def values(self, machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[AxisValue]:
        """The values to try, beside the present one."""
        ...

    def changed(self, settings: SchedulerSettings, value: AxisValue) -> SchedulerSettings:
        """The settings with this value. Raises ValueError if it contradicts the others."""
        ...


@dataclass(frozen=True)
class SettingAxis:
    """An axis that is a field of the scheduler's settings."""

    name: str
    wanted: Values
    is_live: bool = False

    def value(self, settings: SchedulerSettings) -> AxisValue:
        found: AxisValue = getattr(settings, self.name)
        return found

    def values(self, machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[AxisValue]:
        now = self.value(settings)
        return [one for one in self.wanted(machine, settings) if one != now]

    def changed(self, settings: SchedulerSettings, value: AxisValue) -> SchedulerSettings:
        change: dict[str, Any] = {self.name: value}
        return replace(settings, **change)
