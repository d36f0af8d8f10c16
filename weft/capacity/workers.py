"""Simulations in processes of their own, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from weft.capacity.machine import MeasuredMachine
from weft.capacity.trial import LoadPoint, TrialPoint, TrialSettings, simulated
from weft.capacity.workload import LeveledLoad
from weft.config.options import SettingsError


class TrialTask(NamedTuple):
    """What all simulations of a process have in common."""

    machine: MeasuredMachine
    workload: LeveledLoad
    wanted: TrialSettings


_tasks: list[TrialTask] = []  # of this process: one, if it is a worker


class TrialWorkers:
    def __init__(self, num: int, task: TrialTask) -> None:
        self.num = num
        # A copy of this process would have its locks, but not the threads that hold them.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(num, context, initializer=_begin, initargs=(task,))

    def run(self, points: Sequence[TrialPoint]) -> list[LoadPoint]:
        """The figures of these points, in their order. Raises SettingsError."""
        try:
            return list(self._pool.map(_run, points))
        except BrokenProcessPool as exc:
            message = "a process of the search was killed, perhaps for want of memory"
            raise SettingsError(message) from exc

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _begin(task: TrialTask) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tasks.append(task)


def _end_with_parent() -> None:
    """End this process when the first one has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(point: TrialPoint) -> LoadPoint:
    machine, workload, wanted = _tasks[0]
    return simulated(machine, workload, wanted, point)
