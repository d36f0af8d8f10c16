"""A process of ours that answers lines with lines, and may be killed: for work on what strangers have written.

What it reads and answers is JSON, one value a line. It ends with its standard input. Both sides stand here; what the
questions mean is the business of those who use them. Knows no thread: a child is asked by one at a time.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.config.process import module_command

NICENESS = 5  # the server goes first
PR_SET_PDEATHSIG = 1
PIECE = 1 << 16


class ChildEnded(Exception):
    """The child has ended instead of answering. `out_of_time`: because it computed for longer than it may."""

    def __init__(self, out_of_time: bool) -> None:
        super().__init__()
        self.out_of_time = out_of_time


class Child:
    """Runs `module`. Closing it twice does nothing."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            module_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries tell there of their panics
            process_group=0,  # Ctrl-C is for the server; of its session, for the priority of that
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._input, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Send a line, return the line that answers it. Raises TimeoutError, and `ChildEnded`; after either of them
        the child is of no use, and has to be closed."""
        until_s = time.monotonic() + timeout_s
        try:
            self._write(question + b"\n", until_s)
            return self._line(until_s)
        except BrokenPipeError:
            raise self._ended() from None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _write(self, data: bytes, until_s: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self._input, select.POLLOUT, until_s)
            with suppress(BlockingIOError):
                left = left[os.write(self._input, left) :]

    def _line(self, until_s: float) -> bytes:
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            _wait(self._output, select.POLLIN, until_s)
            piece = os.read(self._output, PIECE)
            if not piece:
                raise self._ended()
            pieces.append(piece)
        return b"".join(pieces)

    def _ended(self) -> ChildEnded:
        return ChildEnded(self._process.wait() == -signal.SIGPROF)


def _wait(handle: int, event: int, until_s: float) -> None:
    """Until something can be read or written, or there is an end. Raises TimeoutError."""
    poll = select.poll()  # select() takes no handle beyond 1,023
    poll.register(handle, event)
    left_s = until_s - time.monotonic()
    if left_s <= 0 or not poll.poll(left_s * 1_000):
        raise TimeoutError


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The child's side: answer each line of the standard input, until it ends. On Linux the child does not outlive its
    parent, whatever it is doing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


def limit_memory(num_bytes: int) -> None:
    """Of this process, from now on: `num_bytes` of address space on top of what it has. It lets others go first."""
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_work(seconds: float) -> None:
    """End this process after so many seconds of its processor time, whatever it is in the middle of; 0: no limit.

    Time of the clock is not counted: on a busy machine it says little about the work.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
