"""Starts the processes that hold a model together with this one (`--tp-size`), and ends them.

    this process, rank 0 ── stdin: one line of JSON, open while rank 0 lives ──▶ rank 1, 2, ...
                         ◀─ a pair of sockets that only the two have ──────────▶

Each of them is a child in the process group of rank 0, and dies with it (`launch/follower.py`).
They meet for sums in a file of a private folder. What gloo opens to be connected to, it opens on
the loopback device.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.config.engine import EngineConfig
from weft.config.model import ModelError
from weft.config.process import FollowerArgs, module_command
from weft.executor.wire.followers import READY, Followers, Ranks
from weft.observe.log import EventLog, get_format, get_level
from weft.ops.sharding import RankLost
from weft.parallel.comm import TorchComm, file_store
from weft.parallel.links import SocketLink, socket_links

COMMAND = module_command("weft.launch.follower")
END_S = 2.0  # for followers to end by themselves

log = EventLog("engine")


class RankFailed(ModelError):
    """Another rank could not load its part of the model, as this one would not be able to."""


class FailedRank(msgspec.Struct, frozen=True):
    """Why a follower could not begin; its last message."""

    message: str
    user_error: bool


class StartedRanks:
    """The followers of this process."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """Start them. They load their parts of the model in `folder` while this process does."""
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
        store = file_store(self._meeting / "ranks", self._size)
        comm = TorchComm(store, rank=0, size=self._size, timeout_s=self._timeout_s)
        return Ranks(comm, Followers(self._links))

    def await_loaded(self) -> None:
        """Wait until all have loaded their weights. Raises ModelError where one could not, for a
        reason that the user can mend, and RankLost."""
        self._await_all()
        for rank, process in enumerate(self._processes, start=1):
            name = f"rank-{rank}-reaper"
            threading.Thread(
                target=self._reap, args=(rank, process), name=name, daemon=True
            ).start()

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
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self, rank: int, config: EngineConfig, folder: Path) -> None:
        link, theirs = socket_links()
        with theirs:
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
            args = FollowerArgs(
                config=config,
                folder=str(folder),
                rank=rank,
                link=theirs.fileno(),
                meeting=str(self._meeting / "ranks"),
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
        status = process.wait()
        if self._is_closed:
            return
        why = explain_end(rank, status)
        log.error("rank_lost", reason=why)
        if self._lost is not None:
            self._lost(why)


def explain_end(rank: int, status: int) -> str:
    """Why a rank ended that said nothing itself. `status` is that of a process, or minus the signal
    that ended it."""
    if status < 0:
        return f"rank {rank} was ended by {signal.Signals(-status).name} (signal {-status})"
    return f"rank {rank} ended with exit status {status}; what it printed last stands above"
