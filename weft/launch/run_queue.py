"""Whether a process lacks a processor, as the kernel tells: silence of one that waits for its turn
is no hang, and standing still is no deadlock.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_SHARE = 0.5  # of a processor: who gets more than that does not lack one


class RunQueue:
    """Looks at the process `pid`, but not at its thread `but`.
    Without a /proc nobody is ever found to wait.
    """

    def __init__(self, pid: int, *, but: int = 0, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._but = str(but)
        self._used_s = 0.0

    def is_waited_in(self) -> bool:
        """Whether a thread of it wants to run."""
        try:
            threads = [one for one in (self._folder / "task").iterdir() if one.name != self._but]
        except OSError:
            return False
        return any(_is_runnable(thread / "stat") for thread in threads)

    def holds_up(self, passed_s: float) -> bool:
        """Whether a thread of it wants to run,
        though all of them got little of a processor in the `passed_s` since the last call.
        """
        try:
            before = self._used_s
            self._used_s = _used_s(self._folder / "stat")
        except OSError:
            return False
        return self._used_s - before <= MOST_SHARE * passed_s and self.is_waited_in()


def _fields(stat: Path) -> list[bytes]:
    """Those behind the name, which may hold anything. Source: proc(5), /proc/[pid]/stat."""
    return stat.read_bytes().rpartition(b")")[2].split()


def _used_s(stat: Path) -> float:
    """Processor time of user and kernel."""
    return sum(map(int, _fields(stat)[11:13])) / os.sysconf("SC_CLK_TCK")


def _is_runnable(stat: Path) -> bool:
    try:
        return _fields(stat)[:1] == [b"R"]
    except OSError:  # the thread has ended
        return False
