"""Finds out from the kernel whether a process waits for a processor. The silence of such a process
is not a hang, and its lack of progress is not a deadlock.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_SHARE = 0.5  # share of a processor: a process that gets more does not lack one


class RunQueue:
    """Observes the threads of the process `pid`, except its thread `but`. Without /proc, no thread
    is ever found to wait.
    """

    def __init__(self, pid: int, *, but: int = 0, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._but = str(but)
        self._used_s = 0.0

    def is_waited_in(self) -> bool:
        """Whether a thread of the process is runnable."""
        try:
            threads = [one for one in (self._folder / "task").iterdir() if one.name != self._but]
        except OSError:
            return False
        return any(_is_runnable(thread / "stat") for thread in threads)

    def holds_up(self, passed_s: float) -> bool:
        """Whether a thread of the process is runnable although the process got at most `MOST_SHARE`
        of a processor in the `passed_s` since the last call."""
        try:
            before = self._used_s
            self._used_s = _used_s(self._folder / "stat")
        except OSError:
            return False
        return self._used_s - before <= MOST_SHARE * passed_s and self.is_waited_in()


def _fields(stat: Path) -> list[bytes]:
    """The fields after the process name, which may contain any characters. Source: proc(5),
    /proc/[pid]/stat."""
    return stat.read_bytes().rpartition(b")")[2].split()


def _used_s(stat: Path) -> float:
    """Processor time in user and kernel mode, in seconds."""
    return sum(map(int, _fields(stat)[11:13])) / os.sysconf("SC_CLK_TCK")


def _is_runnable(stat: Path) -> bool:
    try:
        return _fields(stat)[:1] == [b"R"]
    except OSError:  # the thread has ended
        return False
