"""Ranks that are joined by sockets of ours, each in a thread: their sums, and who may join them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from weft.ops.sharding import RankLost
from weft.parallel.comm import file_store
from weft.parallel.socket_sums import SMALL_BYTES, SocketComm

TIMEOUT_S = 120.0


@contextmanager
def joined(path: Path, size: int) -> Iterator[list[SocketComm]]:
    def join(rank: int) -> SocketComm:
        return SocketComm(file_store(path, size), rank=rank, size=size, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(size) as threads:
        comms = list(threads.map(join, range(size)))
    try:
        yield comms
    finally:
        for comm in comms:
            comm.close()


def summed(comms: list[SocketComm], terms: list[torch.Tensor]) -> list[torch.Tensor]:
    found = [term.clone() for term in terms]
    with ThreadPoolExecutor(len(comms)) as threads:
        list(threads.map(lambda comm, x: comm.all_reduce(x), comms, found))
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num", [1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 100_001])
def test_all_ranks_have_the_sum_in_the_order_of_ranks(size: int, num: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(num)
    terms = [torch.randn(num, generator=generator) * 10**rank for rank in range(size)]
    expected = terms[0].clone()
    for term in terms[1:]:
        expected += term
    with joined(tmp_path / "meeting", size) as comms:
        for found in summed(comms, terms):
            assert torch.equal(found, expected)


def test_rank_0_gets_what_all_have(tmp_path: Path) -> None:
    parts = [torch.full((2, 3), float(rank), dtype=torch.bfloat16) for rank in range(3)]
    with joined(tmp_path / "meeting", 3) as comms, ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda comm, x: comm.gather(x), comms, parts))
    assert found[1] is None
    assert found[2] is None
    assert torch.equal(found[0], torch.stack(parts))


def test_who_does_not_know_the_secret_does_not_join(tmp_path: Path) -> None:
    """A stranger who hangs up, and one who answers like a rank with another secret."""
    store = file_store(tmp_path / "meeting", 2)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(
            SocketComm, store, rank=0, size=2, timeout_s=TIMEOUT_S, secret="hush"
        )
        host, port = store.get("weft/0").decode().split()
        socket.create_connection((host, int(port))).close()
        other = file_store(tmp_path / "meeting", 2)
        with pytest.raises(RankLost, match="did not come together"):
            SocketComm(other, rank=1, size=2, timeout_s=TIMEOUT_S, secret="hash")
        assert not first.done()
        second = SocketComm(
            file_store(tmp_path / "meeting", 2),
            rank=1,
            size=2,
            timeout_s=TIMEOUT_S,
            secret="hush",
        )
        comms = [first.result(TIMEOUT_S), second]
    one = torch.ones(4)
    assert torch.equal(summed(comms, [one, one])[0], 2 * one)
    for comm in comms:
        comm.close()


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"rank 0: the 2 ranks did not come together within 0.2 s"):
        SocketComm(file_store(tmp_path / "meeting", 2), rank=0, size=2, timeout_s=0.2)


def test_a_rank_that_is_gone_ends_the_sums_of_the_others(tmp_path: Path) -> None:
    with joined(tmp_path / "meeting", 2) as (first, second):
        waits = threading.Thread(target=second.close)
        waits.start()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            first.all_reduce(torch.ones(4))
        waits.join()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            first.all_reduce(torch.ones(4))
