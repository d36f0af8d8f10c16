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

from tests.handoff.pair import Proxy
from weft.ops.sharding import RankLost
from weft.parallel.comm import file_store
from weft.parallel.socket_sums import SMALL_BYTES, Greeter, SocketComm

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


def test_a_process_that_does_not_know_the_secret_does_not_join(tmp_path: Path) -> None:
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


class StoreOfAnother:
    """A store in which rank 0 listens where somebody else does, who relays what both say."""

    def __init__(self, path: Path, port: int) -> None:
        self._store = file_store(path, 2)
        self.set = self._store.set
        self.set_timeout = self._store.set_timeout
        self._port = port

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        return f"127.0.0.1 {self._port}".encode() if key == "weft/0" else found


@pytest.mark.parametrize("num", [4, SMALL_BYTES])
def test_what_is_changed_on_its_way_between_nodes_is_added_to_nothing(
    num: int, tmp_path: Path
) -> None:
    path = tmp_path / "meeting"
    changes = threading.Event()

    def spoil(content: bytes) -> bytes:
        if not changes.is_set():
            return content
        place = 20  # behind the header
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    store = file_store(path, 2)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(
            SocketComm, store, rank=0, size=2, timeout_s=TIMEOUT_S, secret="hush"
        )
        port = int(store.get("weft/0").decode().split()[1])
        proxy = Proxy(port, spoil)
        relayed = StoreOfAnother(path, proxy.port)
        second = SocketComm(relayed, rank=1, size=2, timeout_s=TIMEOUT_S, secret="hush")
        comms = [first.result(TIMEOUT_S), second]
    one = torch.ones(num)
    assert torch.equal(summed(comms, [one, one])[1], 2 * one)
    changes.set()
    kept = one.clone()
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(comms[0].all_reduce, one.clone())
        with pytest.raises(RankLost, match="comes from rank 0 was changed on its way"):
            second.all_reduce(kept)
        assert torch.equal(kept, one)
        other.exception(TIMEOUT_S)  # it may have had all before the link was closed
    for comm in comms:
        comm.close()
    proxy.close()


def test_both_ends_of_a_connection_have_keys_of_their_own() -> None:
    """Of each direction and connection, and the same at both ends."""
    greeters = [Greeter(rank, "hush", b"token") for rank in range(2)]
    marks: list[tuple[bytes, ...]] = []
    for _ in range(2):
        ends = socket.socketpair()
        with ends[0], ends[1], ThreadPoolExecutor(2) as threads:
            called = threads.submit(greeters[0].greet, ends[0], calls=False)
            caller = greeters[1].greet(ends[1], calls=True)
            found = called.result(TIMEOUT_S)
        assert found.rank == 1
        assert caller.rank == 0
        directions = (found.seals.sending, found.seals.receiving)
        own = tuple(seal.begin().end() for seal in directions)
        theirs = (caller.seals.receiving, caller.seals.sending)
        assert tuple(seal.begin().end() for seal in theirs) == own
        marks.append(own)
    assert len({mark for own in marks for mark in own}) == 4


def test_a_process_that_a_stranger_calls_proves_nothing() -> None:
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as threads:
        greeted = threads.submit(Greeter(0, "hush", b"token").greet, near, calls=False)
        far.sendall(bytes(200))
        with pytest.raises(ConnectionError, match="does not know the secret"):
            greeted.result(TIMEOUT_S)
        near.close()
        assert len(far.recv(1_000)) == 16  # the number that it has drawn


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
