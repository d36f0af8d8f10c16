"""A process that has imported its modules, and waits for the next model to be loaded."""

from __future__ import annotations

from collections.abc import Callable

from weft.launch.engine_group import EngineGroup


class SpareProcess:
    """At most one at a time. `start` starts one; None: nothing is started ahead."""

    def __init__(self, start: Callable[[], EngineGroup | None]) -> None:
        self._start = start
        self._group: EngineGroup | None = None

    def make(self) -> None:
        if self._group is None:
            self._group = self._start()

    def take(self) -> EngineGroup | None:
        """The process, which belongs to the caller; None if there is none that lives."""
        group = self._group
        self._group = None
        if group is not None and group.processes[0].has_ended:
            return None
        return group

    def stop(self) -> None:
        if self._group is not None:
            self._group.stop(0.0)
