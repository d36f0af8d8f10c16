"""Ends a test that hangs, and what a killed run of the tests has started.

pytest-timeout raised its exception wherever the signal came, also between two phases of a test,
where it ended all of pytest. Here the alarm is set only while a phase (setup, call, teardown) runs,
so that it fails that test. A test that hangs in native code sees no exception: then all stacks are
written and the process is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 300.0  # of one phase of a test; another by `@pytest.mark.timeout(seconds)`
GRACE_S = 60.0  # from the exception to the end of the process
RENEWED_S = 10.0  # so long the thread that would end the process serves for one phase after another
MAX_EXTENSIONS = 4  # on a machine with more work than processors, a test has so many limits more
BUSY_LOAD = 2.0  # threads that want a processor, for each processor
OWNER = "TESTS_OF_WEFT"  # environment variable of all that the tests of one process start
HELPERS = (
    "weft.text.templates.render_process",
    "weft.grammar.sandbox_process",
    "tests.forked",
)
LAST_END_S = 10.0  # for processes that were told to end


# ---- tests that hang


class Hung(Exception):
    """The test has taken longer than its limit."""


class LastResort:
    """Ends the process, with its stacks written, if a phase takes far too long and no exception
    helps. A thread waits for that; to start and to join one for each of sixty thousand phases takes
    longer than what most of them do."""

    def __init__(self, stderr: int) -> None:
        """`stderr`: the file to which stacks are written."""
        self.stderr = stderr
        self._began_s = 0.0
        self._most_s = 0.0

    def expect_end(self, most_s: float) -> None:
        """End the process in `most_s`, or up to `RENEWED_S` later."""
        now = time.monotonic()
        if most_s == self._most_s and now < self._began_s + RENEWED_S:
            return
        self._began_s = now
        self._most_s = most_s
        faulthandler.dump_traceback_later(most_s + RENEWED_S, exit=True, file=self.stderr)

    def forget(self) -> None:
        self._most_s = 0.0
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def bounded(limit_s: float, last_resort: LastResort) -> Iterator[None]:
    """Raise `Hung` in this thread, the main one, if the body takes longer than `limit_s`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    extensions = 0

    def ring(number: int, frame: object) -> None:
        nonlocal extensions
        if extensions < MAX_EXTENSIONS and os.getloadavg()[0] > BUSY_LOAD * (os.cpu_count() or 1):
            extensions += 1
            arm()
            return
        faulthandler.dump_traceback(last_resort.stderr, all_threads=True)
        raise Hung(f"the test has taken longer than {limit_s * (1 + extensions):,.0f} s")

    def arm() -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        most_s = limit_s * (MAX_EXTENSIONS + 1 - extensions) + GRACE_S
        last_resort.expect_end(most_s)

    before = signal.signal(signal.SIGALRM, ring)
    arm()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return LIMIT_S if marker is None else float(marker.args[0])


class HangGuard:
    """Bounds each phase. These hooks run where pytest catches what a phase raises."""

    def __init__(self) -> None:
        # While a test runs, 2 is a file that nobody reads.
        self._last_resort = LastResort(os.dup(2))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._last_resort.forget()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with bounded(limit_of(item), self._last_resort):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with bounded(limit_of(item), self._last_resort):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        with bounded(limit_of(item), self._last_resort):
            return (yield)


# ---- processes that outlive their tests

# It waits for the end of its standard input, which is the end of the tests' process, however that
# ends.
_REAPER = """
import os, signal, sys, time
mark, me = sys.argv[1].encode(), os.getpid()
sys.stdin.buffer.read()
quiet = 0
while quiet < 5:
    quiet += 1
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != me and mark in open(f"/proc/{name}/environ", "rb").read().split(b"\\0"):
                os.kill(int(name), signal.SIGKILL)
                quiet = 0
        except OSError:
            pass
    time.sleep(0.1)
"""


class Offspring:
    """All processes that carry the mark of this one in their environment."""

    def __init__(self) -> None:
        self._mark = f"{OWNER}={os.getpid()}-{time.monotonic_ns()}"
        clean = {name: value for name, value in os.environ.items() if name != OWNER}
        os.environ[OWNER] = self._mark.partition("=")[2]
        self._reaper: subprocess.Popen[bytes] | None = None
        if Path("/proc/self/environ").exists():
            command = [sys.executable, "-I", "-S", "-c", _REAPER, self._mark]
            self._reaper = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=clean, start_new_session=True
            )

    def servers(self) -> dict[int, str]:
        """The processes of weft among them that run, with their commands; without those that end
        when this process does, because it holds their standard input."""
        found: dict[int, str] = {}
        if self._reaper is None:
            return found
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not folder.name.isdigit():
                    continue
                marks = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                command = " ".join(words).strip()
                is_helper = any(word in HELPERS for word in words)
                if self._mark.encode() in marks and "weft" in command and not is_helper:
                    found[int(folder.name)] = command[:200]
        return found

    def left(self) -> list[str]:
        """The commands of servers that are still there after a while; they are killed."""
        deadline = time.monotonic() + LAST_END_S
        while (servers := self.servers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in servers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return list(servers.values())
