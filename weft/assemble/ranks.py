"""Starts and ends the processes that hold a model together with this one (`--tp-size`).

    this process, rank 0 ── a private pair of sockets ──────▶ rank 1, 2, ...
                         ── ZeroMQ with CURVE (`nodes.py`) ─▶ ranks of other nodes

The ranks of one machine compute sums in shared memory, which they inherit as an open file; with
gloo, they find each other by a file in a private folder. gloo listens on the loopback device; with
several nodes, on the address that leads to node 0.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from weft.assemble.node_facts import facts_of
from weft.assemble.nodes import OtherNodes
from weft.assemble.rank_processes import RankProcesses
from weft.config.engine import EngineConfig
from weft.config.engine_args import FollowerArgs
from weft.config.model import ModelConfig, ModelError
from weft.config.nodes import ranks_of
from weft.executor.wire.followers import READY, Followers, Ranks
from weft.executor.wire.shared_pool import SharedPool
from weft.observe.log import EventLog, get_format, get_level
from weft.ops.cpp.abi import RANKS_LOST_AT
from weft.ops.cpp.joint import shared_bytes
from weft.ops.sharding import Collective, GroupRank, RankLost
from weft.ops.stages import PpStage
from weft.parallel.comm import TorchComm, address_towards, calling_store, file_store
from weft.parallel.links import Link, Loss, socket_links
from weft.parallel.shared_memory import SharedSegment, anonymous_file
from weft.parallel.socket_sums import SocketComm
from weft.parallel.stage_pipe import SocketPipe

log = EventLog("engine")


class RankFailed(ModelError):
    """Another rank could not load its part of the model, for a reason that the user can correct."""


class FailedRank(msgspec.Struct, frozen=True):
    """The last message of a follower that could not begin: the reason."""

    message: str
    user_error: bool


class StartedRanks:
    """The ranks that follow this process."""

    def __init__(self, config: EngineConfig, folder: Path, model: ModelConfig) -> None:
        """Start the followers of this machine. They load their parts of the model in `folder` while
        this process loads its own. Raises SettingsError if it cannot listen for other nodes."""
        self._memory: int | None = None  # file descriptor of the shared memory
        self._segment: SharedSegment | None = None
        self._pools: list[int] = []  # files with the K and V of each follower, if stored
        self._loss = Loss()
        self._lost: Callable[[str], None] | None = None
        self._config = config
        self._nodes: OtherNodes | None = None
        if config.nnodes > 1:
            self._nodes = OtherNodes(config, facts_of(config, model, folder), self._loss)
        # For each following stage: its ends of the pipes from the stage before and to the next.
        self._ends: list[tuple[socket.socket | None, socket.socket | None]] = []
        self._pipe: SocketPipe | None = None
        self._collective: Collective | None = None
        if config.pp_size > 1:
            self._lay_pipes()
        elif config.dist_backend == "shm":
            widest = max(model.vocab_size, model.hidden_size)
            self._memory = anonymous_file(shared_bytes(config.tp_size, widest))
        self._meeting = Path(tempfile.mkdtemp(prefix=f"weft-{os.getpid()}-"))
        self._processes = RankProcesses(self._note_loss)
        self._links: list[Link] = []
        for rank in self._ranks_here[1:]:
            self._start(rank, folder)
        for ends in self._ends:
            for end in ends:
                if end is not None:
                    end.close()
        if self._nodes is not None:
            self._links.extend(self._nodes.links.values())

    def join(self) -> Ranks:
        """Connect to all other ranks. Raises RankLost if one ends instead, ModelError if a node
        does not come."""
        if self._nodes is not None:
            self._nodes.await_all(self._note_loss)
        self._await_all()
        if self._pipe is not None:
            return Ranks(
                GroupRank(0, 1),
                Followers(self._links, self._loss),
                self._config.dist_timeout,
                pp_stage=pp_stage_of(0, self._config),
                pipe=self._pipe,
            )
        ranks = joined(
            self._config,
            GroupRank(0, self._config.tp_size),
            Followers(self._links, self._loss),
            store=self._store,
            address="127.0.0.1" if self._nodes is None else self._nodes.host,
            memory=self._memory,
        )
        self._segment = ranks.memory
        self._collective = ranks.collective
        return ranks

    def await_loaded(self) -> None:
        """Wait until all ranks have loaded their weights. Raises ModelError if one could not for a
        reason that the user can correct, else RankLost."""
        self._await_all()
        self._forget_meeting()
        self._processes.watch()
        if self._nodes is not None:
            self._nodes.tell_serving()

    def kv_caches(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of K and V of each follower, in shared memory, if they are stored. `own`: the
        tensors of this rank; those of the others have the same shapes. Call it once, after all
        ranks have loaded."""
        found = []
        for file in self._pools:
            pool = SharedPool(file)
            found.append([pool.zeros(tuple(one.shape), one.dtype, one.device) for one in own])
            pool.close()
        self._pools.clear()
        return found

    @property
    def pids(self) -> list[int]:
        """The process ids of the followers of this machine, from rank 1 on."""
        return self._processes.pids

    def on_lost(self, call: Callable[[str], None]) -> None:
        """When a rank has ended before `close`, another thread calls `call` with the reason. `call`
        decides when the other nodes are informed (`take_leave`)."""
        self._lost = call

    def take_leave(self, reason: str = "") -> None:
        """Tell other nodes that this process ends. `reason`: of the end; "" if a user asked for it.
        Any thread may call this."""
        if self._nodes is not None:
            self._nodes.take_leave(reason)

    def close(self, reason: str = "") -> None:
        """End all followers. `reason`: as in `take_leave`."""
        self.take_leave(reason)
        if self._nodes is not None:
            self._nodes.close()
        for link in self._links[: len(self._processes.pids)]:
            link.close()
        self._processes.close()
        if self._pipe is not None:
            self._pipe.close()
        if self._collective is not None:
            self._collective.close()
        while self._pools:
            os.close(self._pools.pop())
        self._forget_meeting()

    @property
    def _ranks_here(self) -> range:
        if self._config.pp_size > 1:
            return range(self._config.pp_size)
        return ranks_of(self._config, 0)

    def _lay_pipes(self) -> None:
        """Make a pipe from each stage to the next. This process is the last stage: it samples."""
        num_pipes = self._config.pp_size - 1
        before: socket.socket | None = None
        for _ in range(num_pipes):
            giving, taking = socket.socketpair()
            self._ends.append((before, giving))
            before = taking
        self._pipe = SocketPipe(before, None, self._config.dist_timeout)

    def _store(self) -> Any:
        if self._nodes is not None:
            return self._nodes.store
        return file_store(self._meeting / "ranks", self._config.tp_size)

    def _forget_meeting(self) -> None:
        """Remove the folder in which ranks find each other: all are connected, or none will be. So
        no later failure leaves it behind."""
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self, rank: int, folder: Path) -> None:
        link, theirs = socket_links()
        with theirs:
            files = [theirs.fileno()]
            if self._memory is not None:
                files.append(self._memory)
            before: socket.socket | None = None
            after: socket.socket | None = None
            if self._ends:
                before, after = self._ends[rank - 1]
                files += [end.fileno() for end in (before, after) if end is not None]
            if self._config.cache_dir:
                self._pools.append(anonymous_file(0))
                files.append(self._pools[-1])
            args = FollowerArgs(
                config=self._config,
                folder=str(folder),
                rank=rank,
                link=theirs.fileno(),
                meeting=str(self._meeting / "ranks"),
                memory=-1 if self._memory is None else self._memory,
                pool=self._pools[-1] if self._pools else -1,
                before=-1 if before is None else before.fileno(),
                behind=-1 if after is None else after.fileno(),
                log_level=get_level(),
                log_format=get_format(),
                host="" if self._nodes is None else self._nodes.host,
                store=0 if self._nodes is None else self._nodes.store_port,
            )
            self._processes.start(args, files)
        self._links.append(link)

    def _await_all(self) -> None:
        """Wait for one message from each rank. Raises RankFailed and RankLost."""
        timeout_s = self._config.dist_timeout
        for rank, link in enumerate(self._links, start=1):
            try:
                kind, data = link.recv(timeout_s)
            except TimeoutError:
                raise RankLost(
                    f"rank {rank} was not ready within {timeout_s:g} s (--dist-timeout)"
                ) from None
            except RankLost as exc:
                if rank not in self._ranks_here:
                    raise
                raise RankLost(self._processes.why_ended(rank)) from exc
            if kind != READY:
                failed = msgspec.json.decode(data, type=FailedRank)
                if failed.user_error:
                    raise RankFailed(failed.message)
                raise RankLost(f"rank {rank} failed: {failed.message}")

    def _note_loss(self, why: str) -> None:
        """Wake all that wait for a lost rank. Runs on its own thread, as soon as a rank has ended
        before `close`."""
        self._loss.tell(why)
        log.error("rank_lost", reason=why)
        if self._segment is not None:
            self._segment.set_byte(RANKS_LOST_AT)  # no rank waits for it any more
        if self._pipe is not None:
            self._pipe.wake()
        if self._lost is not None:
            self._lost(why)


def pp_stage_of(rank: int, config: EngineConfig) -> PpStage:
    """The stage of a rank. Rank 0 samples, so it has the last layers; ranks 1, 2, ... have the
    others in order."""
    return PpStage((rank - 1) % config.pp_size, config.pp_size)


def joined(
    config: EngineConfig,
    group_rank: GroupRank,
    followers: Followers | None,
    *,
    store: Callable[[], Any],
    address: str,
    memory: int | None,
) -> Ranks:
    """Connect to all other ranks: by the shared memory of the file descriptor `memory`, or by
    `store`; then this rank listens on `address` of this machine. Raises RankLost."""
    timeout_s = config.dist_timeout
    if memory is not None:
        return Ranks(group_rank, followers, timeout_s, memory=SharedSegment(memory))
    rank, size = group_rank
    comm: Collective
    if config.dist_backend == "tcp":
        comm = SocketComm(
            store(),
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            address=address,
            secret=config.dist_secret,
        )
    else:
        comm = TorchComm(store(), rank=rank, size=size, timeout_s=timeout_s, address=address)
    return Ranks(group_rank, followers, timeout_s, collective=comm)


def joined_as(args: FollowerArgs) -> Ranks:
    """Like `joined`, for a follower. Raises RankLost."""
    config = args.config
    if config.pp_size > 1:
        before = None if args.before < 0 else socket.socket(fileno=args.before)
        after = None if args.behind < 0 else socket.socket(fileno=args.behind)
        pipe = SocketPipe(before, after, config.dist_timeout)
        pp_stage = pp_stage_of(args.rank, config)
        return Ranks(GroupRank(0, 1), None, config.dist_timeout, pp_stage=pp_stage, pipe=pipe)

    def store() -> Any:
        if args.host:
            return calling_store(args.host, args.store, config.tp_size, config.dist_timeout)
        return file_store(Path(args.meeting), config.tp_size)

    ranks = joined(
        config,
        GroupRank(args.rank, config.tp_size),
        None,
        store=store,
        address=address_towards(args.host) if args.host else "127.0.0.1",
        memory=None if args.memory < 0 else args.memory,
    )
    if args.pool < 0:
        return ranks
    return replace(ranks, pool=SharedPool(args.pool))
