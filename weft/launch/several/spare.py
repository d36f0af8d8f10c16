"""Processes that have imported their modules, and wait for the next model to be loaded: that of an
engine, and that of a chat template."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weft.config.process import Child
from weft.launch.engine_group import EngineGroup
from weft.text.templates.renderer import MODULE


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


class SpareTemplate:
    """At most one process of a chat template that has none yet. Calls may come from all threads;
    the process ends with the thread that calls `make`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._is_stopped = False

    def make(self) -> None:
        with self._lock:
            if self._child is None and not self._is_stopped:
                self._child = Child(MODULE)

    def take(self) -> Child | None:
        """The process, which belongs to the caller; None if there is none that lives."""
        with self._lock:
            child = self._child
            self._child = None
        if child is not None and not child.is_alive:
            child.close()
            return None
        return child

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        child = self.take()
        if child is not None:
            child.close()
