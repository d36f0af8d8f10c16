"""Several ranks in one process, each in a thread: sockets or gloo join them, and pairs of sockets
carry plans."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.executor.driver import MODEL, Driver, Turn, make_driver
from weft.config.decoder import AttentionSpec, LayerSpec, MoeSpec, RouterSpec
from weft.config.model import ModelConfig
from weft.executor.ranks.follower import follow
from weft.executor.wire.followers import Followers, Ranks
from weft.ops.sharding import GroupRank
from weft.ops.stages import PpStage
from weft.parallel.comm import TorchComm, file_store
from weft.parallel.links import SocketLink, socket_links
from weft.parallel.socket_sums import SocketComm
from weft.parallel.stage_pipe import SocketPipe
from weft.plan.step import LAST_SAMPLED

TIMEOUT_S = 120.0


BACKENDS = {"tcp": SocketComm, "gloo": TorchComm}


class CountedComm:
    """Writes down what it was asked to do."""

    def __init__(self, inner: SocketComm | TorchComm) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, x: Any) -> None:
        self.calls.append(("sum", x.numel()))
        self._inner.all_reduce(x)

    def gather(self, x: Any) -> Any:
        self.calls.append(("gather", x.numel()))
        return self._inner.gather(x)

    def close(self) -> None:
        self._inner.close()


def join(path: Path, size: int, backend: str = "tcp") -> list[CountedComm]:
    """One end for each rank; all must be there at once."""

    def end(rank: int) -> CountedComm:
        store = file_store(path, size)
        make = BACKENDS[backend]
        return CountedComm(make(store, rank=rank, size=size, timeout_s=TIMEOUT_S))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(end, range(size)))


@contextmanager
def running(
    model: ModelConfig,
    size: int,
    where: Path,
    folder: Path | None = None,
    *,
    may_fail: bool = False,
    backend: str = "tcp",
    **settings: Any,
) -> Iterator[tuple[Driver, list[CountedComm]]]:
    """A driver of rank 0, whose plans all others follow. `may_fail`: what they raise is
    expected."""
    comms = join(where / "meeting", size, backend)
    pairs = [socket_links() for _ in range(size - 1)]
    followers: list[Future[None]] = []
    with ThreadPoolExecutor(size) as threads:
        for rank, (_, end) in enumerate(pairs, start=1):
            link = SocketLink(end)
            ranks = Ranks(GroupRank(rank, size), None, TIMEOUT_S, comms[rank])
            followers.append(threads.submit(_follow, model, folder, ranks, link, settings))
        ranks = Ranks(
            GroupRank(0, size), Followers([mine for mine, _ in pairs]), TIMEOUT_S, comms[0]
        )
        driver = make_driver(model, folder, ranks, **settings)
        try:
            yield driver, comms
        finally:
            _end(driver, pairs, followers, may_fail=may_fail)
            comms[0].close()


@contextmanager
def staged(
    model: ModelConfig, size: int, *, may_fail: bool = False, **settings: Any
) -> Iterator[Driver]:
    """A driver of the last of `size` stages, in whose steps all others compute their layers."""
    links = [socket_links() for _ in range(size - 1)]
    pipes = [socket.socketpair() for _ in range(size - 1)]
    before: list[socket.socket | None] = [None, *(taking for _, taking in pipes)]
    behind: list[socket.socket | None] = [*(giving for giving, _ in pipes), None]
    followers: list[Future[None]] = []

    def ranks_of(stage: int, others: Followers | None) -> Ranks:
        pipe = SocketPipe(before[stage], behind[stage], TIMEOUT_S)
        place = PpStage(stage, size)
        return Ranks(GroupRank(0, 1), others, TIMEOUT_S, pp_stage=place, pipe=pipe)

    with ThreadPoolExecutor(size) as threads:
        for stage, (_, end) in enumerate(links):
            ranks = ranks_of(stage, None)
            link = SocketLink(end)
            followers.append(threads.submit(_follow, model, None, ranks, link, settings))
        last = ranks_of(size - 1, Followers([mine for mine, _ in links]))
        driver = make_driver(model, None, last, **settings)
        try:
            yield driver
        finally:
            _end(driver, links, followers, may_fail=may_fail)
            for pair in pipes:
                for one in pair:
                    one.close()


def _end(
    driver: Driver,
    links: list[tuple[SocketLink, socket.socket]],
    followers: list[Future[None]],
    *,
    may_fail: bool,
) -> None:
    """Followers end with their links, and what they raised is raised."""
    for mine, _ in links:
        mine.close()
    driver.runner.close()
    for follower in followers:
        error = follower.exception(TIMEOUT_S)
        if error is not None and not may_fail:
            raise error


def _follow(
    model: ModelConfig,
    folder: Path | None,
    ranks: Ranks,
    link: SocketLink,
    settings: dict[str, Any],
) -> None:
    threading.current_thread().name = f"rank {ranks.group_rank.rank}"
    driver = make_driver(model, folder, ranks, **settings)
    comm = ranks.collective
    try:
        follow(driver.runner, link, ranks.group_rank.rank)
    finally:
        link.close()
        driver.runner.close()
        if isinstance(comm, CountedComm):
            comm.close()
        if isinstance(ranks.pipe, SocketPipe):
            ranks.pipe.close()  # as the end of a process does


LLAMA = replace(MODEL, num_heads=4, num_kv_heads=2, intermediate_size=32)
EXPERTS_WITH_BIAS = LayerSpec(
    attention=AttentionSpec(sinks=True),
    mlp=MoeSpec(router=RouterSpec(num_experts=4, num_chosen=3, bias=True), size=40, bias=True),
)


def few_steps(driver: Driver) -> list[torch.Tensor]:
    """Prompts, a chunk behind another, steps of both kinds."""
    return [
        driver.run(Turn(0, [3, 5, 7, 11]), Turn(1, [60, 2, 0], samples=False)),
        driver.run(Turn(0, [13]), Turn(1, [8, 9]), Turn(2, list(range(20)))),
        driver.run(Turn(0, [17]), Turn(1, [19]), Turn(2, [LAST_SAMPLED])),
    ]


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
