"""Starts the processes that hold a model together with this one (`--tp-size`), and ends them.

    this process, rank 0 ── stdin: one line of JSON, open while rank 0 lives ──▶ rank 1, 2, ...
                         ◀─ a pair of sockets that only the two have ──────────▶

Each of them is a child in the process group of rank 0, and dies with it (`launch/follower.py`).
They meet for sums in memory that they inherit as an open file; or, where gloo joins them, in a file
of a private folder. What gloo opens to be connected to, it opens on the loopback device.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.config.process import FollowerArgs, module_command
from weft.executor.wire.followers import READY, Followers, Ranks
from weft.observe.log import EventLog, get_format, get_level
from weft.ops.cpp.abi import RANKS_LOST_AT
from weft.ops.cpp.sharded import shared_bytes
from weft.ops.sharding import RankLost, RankPlace
from weft.parallel.comm import TorchComm, file_store
from weft.parallel.links import SocketLink, socket_links
from weft.parallel.shared_memory import SharedSegment, anonymous_file

COMMAND = module_command("weft.launch.follower")
END_S = 2.0  # for followers to end by themselves
STOPPED_S = 2.0  # a rank that somebody has stopped for longer is lost

log = EventLog("engine")


class RankFailed(ModelError):
    """Another rank could not load its part of the model, as this one would not be able to."""


class FailedRank(msgspec.Struct, frozen=True):
    """Why a follower could not begin; its last message."""

    message: str
    user_error: bool


class StartedRanks:
    """The followers of this process."""

    def __init__(self, config: EngineConfig, folder: Path, model: ModelConfig) -> None:
        """Start them. They load their parts of the model in `folder` while this process does."""
        self._memory: int | None = None  # number of the open file that all share
        self._segment: SharedSegment | None = None
        if config.dist_backend == "shm":
            widest = max(model.vocab_size, model.hidden_size)
            self._memory = anonymous_file(shared_bytes(config.tp_size, widest))
        self._size = config.tp_size
        self._timeout_s = config.dist_timeout
        self._is_closed = False
        self._lost: Callable[[str], None] | None = None
        self._meeting = Path(tempfile.mkdtemp(prefix=f"weft-{os.getpid()}-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[SocketLink] = []
        for rank in range(1, self._size):
            self._start(rank, config, folder)

    def join(self) -> Ranks:
        """Meet all others. Raises RankLost if one of them ends instead."""
        self._await_all()
        ranks = joined(
            RankPlace(0, self._size),
            Followers(self._links),
            self._timeout_s,
            meeting=self._meeting / "ranks",
            memory=self._memory,
        )
        self._segment = ranks.memory
        return ranks

    def await_loaded(self) -> None:
        """Wait until all have loaded their weights. Raises ModelError where one could not, for a
        reason that the user can mend, and RankLost."""
        self._await_all()
        self._forget_meeting()
        for rank, process in enumerate(self._processes, start=1):
            name = f"rank-{rank}-reaper"
            threading.Thread(
                target=self._reap, args=(rank, process), name=name, daemon=True
            ).start()

    @property
    def pids(self) -> list[int]:
        """Of the followers, from rank 1 on."""
        return [process.pid for process in self._processes]

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Call this with the reason, on another thread, when a rank has ended unasked."""
        self._lost = call

    def close(self) -> None:
        """End all of them."""
        self._is_closed = True
        for link in self._links:
            link.close()
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._forget_meeting()

    def _forget_meeting(self) -> None:
        """All are connected, or nobody will be: whatever happens from now on, nothing is left."""
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self, rank: int, config: EngineConfig, folder: Path) -> None:
        link, theirs = socket_links()
        with theirs:
            files = [theirs.fileno()]
            if self._memory is not None:
                files.append(self._memory)
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, pass_fds=files)
            args = FollowerArgs(
                config=config,
                folder=str(folder),
                rank=rank,
                link=theirs.fileno(),
                meeting=str(self._meeting / "ranks"),
                memory=-1 if self._memory is None else self._memory,
                log_level=get_level(),
                log_format=get_format(),
            )
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already: its link tells
                process.stdin.write(args.to_json() + b"\n")
                process.stdin.flush()
        self._processes.append(process)
        self._links.append(link)

    def _await_all(self) -> None:
        """Wait for a word of each."""
        for rank, link in enumerate(self._links, start=1):
            try:
                kind, data = link.recv(self._timeout_s)
            except TimeoutError:
                raise RankLost(
                    f"rank {rank} was not ready within {self._timeout_s:g} s (--dist-timeout)"
                ) from None
            except RankLost:
                raise RankLost(self._why_ended(rank)) from None
            if kind != READY:
                failed = msgspec.json.decode(data, type=FailedRank)
                if failed.user_error:
                    raise RankFailed(failed.message)
                raise RankLost(f"rank {rank} failed: {failed.message}")

    def _why_ended(self, rank: int) -> str:
        process = self._processes[rank - 1]
        try:
            return explain_end(rank, process.wait(END_S))
        except subprocess.TimeoutExpired:
            return f"rank {rank} has ended"

    def _reap(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a follower, and tell of it unless it was asked for."""
        why = _why_lost(rank, process)
        if self._is_closed:
            return
        log.error("rank_lost", reason=why)
        if self._segment is not None:
            self._segment.set_byte(RANKS_LOST_AT)  # nobody waits for it any more
        if self._lost is not None:
            self._lost(why)


def _why_lost(rank: int, process: subprocess.Popen[bytes]) -> str:
    """Wait until a follower ends, or is stopped for longer than `STOPPED_S`."""
    events = os.WEXITED | os.WSTOPPED | os.WCONTINUED
    while True:
        event = os.waitid(os.P_PID, process.pid, events | os.WNOWAIT)
        assert event is not None, "waitid has waited"
        if event.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            return explain_end(rank, process.wait())
        # This event alone: the next one may be there already.
        seen = os.WSTOPPED if event.si_code == os.CLD_STOPPED else os.WCONTINUED
        os.waitid(os.P_PID, process.pid, seen | os.WNOHANG)
        if event.si_code == os.CLD_STOPPED and _stays_stopped(process.pid):
            name = signal.Signals(event.si_status).name
            return f"rank {rank} was stopped by {name} (signal {event.si_status})"


def _stays_stopped(pid: int) -> bool:
    """Whether nothing happens to a stopped process for `STOPPED_S`."""
    deadline = time.monotonic() + STOPPED_S
    while time.monotonic() < deadline:
        events = os.WEXITED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, pid, events) is not None:
            return False
        time.sleep(STOPPED_S / 20)
    return True


def joined(
    place: RankPlace,
    followers: Followers | None,
    timeout_s: float,
    *,
    meeting: Path,
    memory: int | None,
) -> Ranks:
    """Meet all other ranks: in the memory of an open file, or else in the file `meeting`. Raises
    RankLost."""
    if memory is not None:
        return Ranks(place, followers, timeout_s, memory=SharedSegment(memory))
    store = file_store(meeting, place.size)
    comm = TorchComm(store, rank=place.rank, size=place.size, timeout_s=timeout_s)
    return Ranks(place, followers, timeout_s, collective=comm)


def explain_end(rank: int, status: int) -> str:
    """Why a rank ended that said nothing itself. `status` is that of a process, or minus the signal
    that ended it."""
    if status < 0:
        return f"rank {rank} was ended by {signal.Signals(-status).name} (signal {-status})"
    return f"rank {rank} ended with exit status {status}; what it printed last stands above"
