"""Starts, watches and ends the processes of the ranks of one machine.

    this process ── stdin: one line of JSON, open while this process lives ──▶ rank 1, 2, ...

Each process is a child in this process's group, and dies with it (`launch/follower.py`). This
module imports no torch: on a following node, the process that starts the ranks computes nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from weft.config.engine_args import FollowerArgs
from weft.config.process import LAST_WORDS_BYTES, module_command

COMMAND = module_command("weft.launch.follower")
END_S = 2.0  # time for ranks to end by themselves
STOPPED_S = 2.0  # a rank that stays stopped (SIGSTOP) for longer is lost


class RankProcesses:
    """Child processes that each hold a part of a model."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        """`on_end` is called with the reason, on another thread, when a watched process has ended
        before `close`."""
        self._on_end = on_end
        self._is_closed = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._last_words: dict[int, int] = {}  # rank → pipe with its reason to end

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of ranks."""
        return [process.pid for process in self._processes.values()]

    def start(self, args: FollowerArgs, files: Sequence[int] = ()) -> None:
        """Start a rank. `files`: open file descriptors that it inherits."""
        self._last_words[args.rank], theirs = os.pipe()
        args = msgspec.structs.replace(args, last_words=theirs)
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, pass_fds=(*files, theirs))
        os.close(theirs)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already: a later wait notices
            process.stdin.write(args.to_json() + b"\n")
            process.stdin.flush()
        self._processes[args.rank] = process

    def watch(self) -> None:
        """Watch all processes: from now on `on_end` is called."""
        for rank, process in self._processes.items():
            name = f"rank-{rank}-reaper"
            threading.Thread(
                target=self._reap, args=(rank, process), name=name, daemon=True
            ).start()

    def why_ended(self, rank: int) -> str:
        """The reason why a rank ended, after it said that it ends or its link broke. Call it only
        before `watch`."""
        process = self._processes[rank]
        try:
            return self._explained(rank, process.wait(END_S))
        except subprocess.TimeoutExpired:
            return f"rank {rank} has ended"

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._last_words:
            os.close(self._last_words.popitem()[1])

    def _reap(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a rank ends, and call `on_end` unless `close` was called."""
        why = _why_stopped(rank, process)
        if not self._is_closed:
            self._on_end(why or self._explained(rank, process.wait()))

    def _explained(self, rank: int, status: int) -> str:
        """The reason why a rank has ended: its own message if it wrote one."""
        said = b""
        if status > 0 and rank in self._last_words:
            said = os.read(self._last_words[rank], LAST_WORDS_BYTES)
        if said:
            return f"rank {rank} failed: {said.decode(errors='replace')}"
        return explain_end(rank, status)


def _why_stopped(rank: int, process: subprocess.Popen[bytes]) -> str:
    """Wait until a rank ends, or is stopped for longer than `STOPPED_S`. Returns "" for an end,
    else the reason."""
    events = os.WEXITED | os.WSTOPPED | os.WCONTINUED
    while True:
        try:
            event = os.waitid(os.P_PID, process.pid, events | os.WNOWAIT)
        except ChildProcessError:  # `close` has already waited for it
            return ""
        assert event is not None, "waitid has waited"
        if event.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            return ""
        # Consume only this event: the next one may be pending already.
        seen = os.WSTOPPED if event.si_code == os.CLD_STOPPED else os.WCONTINUED
        os.waitid(os.P_PID, process.pid, seen | os.WNOHANG)
        if event.si_code == os.CLD_STOPPED and _stays_stopped(process.pid):
            name = signal.Signals(event.si_status).name
            return f"rank {rank} was stopped by {name} (signal {event.si_status})"


def _stays_stopped(pid: int) -> bool:
    """Whether a stopped process neither continues nor ends for `STOPPED_S`."""
    deadline = time.monotonic() + STOPPED_S
    while time.monotonic() < deadline:
        events = os.WEXITED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, pid, events) is not None:
            return False
        time.sleep(STOPPED_S / 20)
    return True


def explain_end(rank: int, status: int) -> str:
    """The reason why a rank ended that wrote no message. `status`: its exit status, or -n if signal
    n ended it."""
    if status < 0:
        return f"rank {rank} was ended by {signal.Signals(-status).name} (signal {-status})"
    return f"rank {rank} ended with exit status {status}; its last output is above"
