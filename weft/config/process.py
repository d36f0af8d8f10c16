"""Processes that weft starts: the command, and child processes that answer lines with lines.

A `Child` works on untrusted input: it may be killed at any time. It reads and answers JSON, one
value per line, and ends with its standard input. This module has both sides; callers define the
meaning of the questions. A child has one caller at a time, and no threads.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

NICENESS = 5  # the server has priority over children
PR_SET_PDEATHSIG = 1
# Libraries start a thread for each processor, each of which takes memory.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3
MOST_IN_HEAP = 1 << 25  # bytes: the highest M_MMAP_THRESHOLD that glibc accepts
ADDRESSES, RESIDENT = 0, 1  # columns of statm
PIECE = 1 << 16
LAST_WORDS_BYTES = 1 << 12


def module_command(name: str) -> tuple[str, ...]:
    """The command that runs a module in its own process. The process imports from the current
    folder only if this process does: so a torch.py in a model's folder is not run when a user
    serves the model from there.
    """
    is_here = sys.path[0] in ("", os.getcwd())
    return (sys.executable, *(() if is_here else ("-P",)), "-m", name)


class ChildEnded(Exception):
    """The child has ended instead of answering. `out_of_time`: it used more processor time than
    allowed (`limit_work`)."""

    def __init__(self, out_of_time: bool) -> None:
        super().__init__()
        self.out_of_time = out_of_time


class Child:
    """A child process that runs `module`. A second `close` does nothing."""

    def __init__(self, module: str, files: Sequence[int] = ()) -> None:
        """`files`: descriptors that the child inherits under the same numbers."""
        self._process = subprocess.Popen(
            module_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print panics there
            process_group=0,  # Ctrl-C is for the server; same session, so same priority
            bufsize=0,
            pass_fds=tuple(files),
            env=os.environ | ONE_THREAD,
        )
        with suppress(OSError, AttributeError):  # from its first instruction, imports included
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.nice(0) + NICENESS)
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
        """Send a line and return the line that answers it. Raises TimeoutError and `ChildEnded`;
        after either, the child cannot be used and must be closed.
        """
        until_s = time.monotonic() + timeout_s
        try:
            self._write(question + b"\n", until_s)
            return self._line(until_s)
        except BrokenPipeError:
            raise self._ended() from None

    def kill(self) -> None:
        """End the child without waiting for its end. Any thread may call this; one that asks at
        this moment gets `ChildEnded`."""
        self._process.kill()

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
    """Wait until `handle` can be read or written, or its other end is closed. Raises
    TimeoutError."""
    poll = select.poll()  # select() takes no handle above 1,023
    poll.register(handle, event)
    left_s = until_s - time.monotonic()
    if left_s <= 0 or not poll.poll(left_s * 1_000):
        raise TimeoutError


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The child's side: answer each line of standard input until it ends. On Linux the child never
    outlives its parent.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


def limit_memory(num_bytes: int) -> None:
    """Limit this process, until the next call, to `num_bytes` more address space than it has."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[ADDRESSES])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


class KeptMemory:
    """Lets this process keep up to `num_bytes` of the memory that it frees, instead of getting it
    page by page for each question. Only glibc knows how; elsewhere this does nothing."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._least = _num_pages(RESIDENT)
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, min(num_bytes, MOST_IN_HEAP))
            libc.mallopt(M_TRIM_THRESHOLD, num_bytes)

    def give_back(self) -> None:
        """Give free memory back to the system if the process has more than it may keep."""
        grown = _num_pages(RESIDENT) - self._least
        if grown * os.sysconf("SC_PAGE_SIZE") <= self._num_bytes:
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _num_pages(column: int) -> int:
    """A column of /proc/self/statm; 0 where there is none."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[column])
    return 0


def limit_work(seconds: float) -> None:
    """End this process after `seconds` of its processor time, whatever it is doing; 0: no limit.

    Wall-clock time is not counted: on a busy machine it says little about the work.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
