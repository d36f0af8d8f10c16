"""Finds out from the kernel how much processor time the threads of processes got, and for how long
they waited for it. The silence of a process that waits for a processor is not a hang, and its lack
of progress is not a deadlock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NS = 1e-9
# States of a thread that could go on: R runs or waits for a processor; D waits for a disk, which
# a busy machine makes slow, too. Source: proc(5), /proc/[pid]/stat.
DELAYED = (b"R", b"D")


class Use(NamedTuple):
    """What the observed threads did since the last look. Sums over threads, in seconds."""

    used_s: float  # processor time
    waited_s: float  # time for which they were delayed: they waited for a processor, or for a disk

    @property
    def share(self) -> float:
        """The part of the wanted processor time that they got, 0 to 1; 1 if they wanted none."""
        wanted_s = self.used_s + self.waited_s
        return self.used_s / wanted_s if wanted_s else 1.0


class ProcessorUse:
    """Observes the threads of some processes."""

    def __init__(self, pids: Sequence[int], *, but: int = 0, proc: Path = Path("/proc")) -> None:
        """`but`: a thread whose processor time does not count, for example the one that looks. The
        time for which it waits counts: others may need a lock that it holds."""
        self._folders = [proc / str(pid) / "task" for pid in pids]
        self._but = str(but)
        self._before: dict[str, Times] | None = None

    def look(self, passed_s: float) -> Use | None:
        """The use in the `passed_s` since the last look. None if the system does not tell.

        A first look, which also follows `forget`, has nothing to compare with: it only finds the
        threads that are delayed at this moment.
        """
        now: dict[str, Times] = {}
        used_s = waited_s = 0.0
        for name, times in self._threads():
            now[name] = times
            before = times if self._before is None else self._before.get(name, START)
            used = min(max(times.used_s - before.used_s, 0.0), passed_s)
            waited = max(times.waited_s - before.waited_s, 0.0)
            if times.is_delayed and name != self._but:
                # The kernel adds the time of waiting only when the thread gets a processor.
                waited = passed_s
            waited_s += min(waited, passed_s - used)
            if name != self._but:
                used_s += used
        if not now:
            return None
        self._before = now
        return Use(used_s, waited_s)

    def forget(self) -> None:
        """The next look is a first one."""
        self._before = None

    def _threads(self) -> Iterator[tuple[str, Times]]:
        for folder in self._folders:
            try:
                names = os.listdir(folder)
            except OSError:  # the process has ended, or there is no /proc
                continue
            for name in names:
                times = _times(folder / name)
                if times is not None:
                    yield name, times


class Times(NamedTuple):
    """The totals of one thread."""

    used_s: float
    waited_s: float
    is_delayed: bool


START = Times(0.0, 0.0, False)


def _times(thread: Path) -> Times | None:
    """The totals of the thread with this folder in /proc; None if it has ended."""
    try:
        # The name of the process, in brackets, may contain any characters.
        fields = (thread / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    is_delayed = fields[0] in DELAYED
    try:
        ran_ns, waited_ns, _ = (thread / "schedstat").read_bytes().split()
    except (OSError, ValueError):  # a kernel that does not count, or the thread has just ended
        ticks = int(fields[11]) + int(fields[12])
        return Times(ticks / os.sysconf("SC_CLK_TCK"), 0.0, is_delayed)
    return Times(int(ran_ns) * NS, int(waited_ns) * NS, is_delayed)
