"""KV in the memory of the host: what is evicted from the pool is found there, alone and before a
store on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiers.pool import BLOCK_LEN, HANG_S, NUM_PAGES, PAGE_SIZE, key_of, pages
from weft.arrays import IntArray
from weft.executor.cpu.kv_io import KvPages
from weft.executor.gpu.host_memory import HostMemory
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import Landed, TierNews, Written
from weft.tiers.disk.store import DiskTiers
from weft.tiers.host.store import HostTiers

NUM_PLACES = 16  # pages: 8 blocks


class Hosted:
    """A pool of two tensors, host memory behind it, and a disk behind that, if there is a
    `folder`."""

    def __init__(self, folder: Path | None = None, num_host_pages: int = NUM_PLACES) -> None:
        shapes = [(2, 3), (5,)]
        self.pool = [torch.zeros(NUM_PAGES * PAGE_SIZE, *shape) for shape in shapes]
        self.memory = HostMemory(self.pool, PAGE_SIZE, num_host_pages)
        self.rung = threading.Event()
        self.number = 0
        self.fingerprint = b"f" * 32
        self.disk: DiskTiers | None = None
        if folder is not None:
            self.disk = DiskTiers(
                folder,
                KvPages(self.memory.tensors, PAGE_SIZE),
                page_size=PAGE_SIZE,
                block_len=BLOCK_LEN,
                max_bytes=1_000_000_000,
                weights=lambda: lambda: self.fingerprint,
                notify=self.rung.set,
                floor_bytes=0,
            )
            self.disk.start()
        self.tiers = HostTiers(
            self.memory,
            page_size=PAGE_SIZE,
            block_len=BLOCK_LEN,
            notify=self.rung.set,
            below=self.disk,
        )
        self.tiers.start()
        assert self.tiers.take().has_opened
        self.until(lambda: folder is None or self.tiers.report().state == "open")

    def until(self, is_so: object) -> None:
        deadline = time.monotonic() + HANG_S
        while not is_so():  # type: ignore[operator]
            assert time.monotonic() < deadline
            self.tiers.take()
            time.sleep(0.001)

    def fill(self, where: IntArray, seed: int) -> list[torch.Tensor]:
        for tensor in self.pool:
            values = np.random.default_rng(seed).normal(size=tensor[self.slots(where)].shape)
            tensor[self.slots(where)] = torch.from_numpy(values).to(tensor.dtype)
        return self.content(where)

    def content(self, where: IntArray) -> list[torch.Tensor]:
        return [tensor[self.slots(where)].clone() for tensor in self.pool]

    @staticmethod
    def slots(where: IntArray) -> torch.Tensor:
        return torch.cat([torch.arange(PAGE_SIZE) + PAGE_SIZE * page for page in where.tolist()])

    def news(self) -> TierNews:
        deadline = time.monotonic() + HANG_S
        while True:
            news = self.tiers.take()
            if news.landed or news.written:
                return news
            assert time.monotonic() < deadline
            self.rung.wait(0.01)
            self.rung.clear()

    def write(self, key: CacheKey, where: IntArray, start: int = 0) -> Written:
        self.number += 1
        self.tiers.keep(self.number, key, start, where)
        (written,) = self.news().written
        assert written.ticket == self.number
        return written

    def read(self, key: CacheKey, where: IntArray, start: int = 0) -> Landed:
        self.number += 1
        self.tiers.fetch(self.number, key, start, where)
        (landed,) = self.news().landed
        assert landed.ticket == self.number
        return landed

    def found(self, key: CacheKey) -> int:
        return self.tiers.seek(0, key, 0, 0).num_tokens


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_was_copied_to_the_host_comes_back_the_same() -> None:
    hosted = Hosted()
    expected = hosted.fill(pages(3, 6), 1)
    assert hosted.found(key_of(24)) == 0
    assert hosted.write(key_of(24), pages(3, 6)).num_bytes == 3 * 2 * hosted.memory.page_bytes
    assert hosted.tiers.lacks(key_of(24)).num_tokens == hosted.found(key_of(24)) == 24
    scattered = np.array([40, 7, 30, 31, 2, 50], dtype=np.int32)
    landed = hosted.read(key_of(24), scattered)
    assert landed.num_tokens == 24
    assert landed.num_from_host == 24
    assert same(hosted.content(scattered), expected)
    assert hosted.found(key_of(24, namespace="salt")) == 0
    # The end alone, for whoever has the beginning.
    assert hosted.read(key_of(24), pages(60, 2), 16).num_tokens == 8
    assert same(hosted.content(pages(60, 2)), [one[16:] for one in expected])


def test_the_least_recently_used_block_goes_for_another() -> None:
    hosted = Hosted()
    for seed in range(8):
        hosted.fill(pages(2 * seed, 2), seed)
        hosted.write(key_of(8, seed), pages(2 * seed, 2))
    hosted.read(key_of(8, 0), pages(20, 2))
    hosted.write(key_of(16, 9), pages(30, 4))
    assert [hosted.found(key_of(8, seed)) for seed in range(4)] == [8, 0, 0, 8]
    report = hosted.tiers.report()
    assert report.host_blocks == 8
    assert report.host_dropped_blocks == 2
    assert report.host_bytes == report.max_host_bytes
    # More than there is room for: as much of its beginning as there is.
    assert hosted.write(key_of(80, 10), pages(0, 20)).num_bytes > 0
    assert hosted.found(key_of(80, 10)) == 64


def test_of_a_sequence_the_end_goes_first() -> None:
    hosted = Hosted(num_host_pages=6)  # three blocks
    long = key_of(24)
    hosted.write(long, pages(0, 6))
    for seed in (1, 2):
        hosted.write(key_of(8, seed), pages(0, 2))
        assert hosted.found(long) == 24 - 8 * seed
        hosted.read(long, pages(10, 6))
        hosted.read(key_of(8, seed), pages(10, 2))


def test_of_what_is_longer_than_there_is_room_the_beginning_stays() -> None:
    hosted = Hosted()
    hosted.write(key_of(8, 1), pages(0, 2))
    hosted.write(key_of(48), pages(0, 12))
    hosted.write(key_of(64), pages(12, 4), 48)
    assert hosted.found(key_of(64)) == 64  # the other one has gone, which was used last
    assert hosted.write(key_of(80), pages(16, 4), 64).num_bytes == 0
    assert hosted.found(key_of(80)) == 64


def test_a_block_that_is_being_read_gives_its_place_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = Hosted(num_host_pages=4)  # two blocks
    content = hosted.fill(pages(0, 4), 1)
    hosted.write(key_of(16), pages(0, 4))
    load = hosted.memory.load
    may_load = threading.Event()

    def late(places: IntArray, pages: IntArray) -> None:
        assert may_load.wait(HANG_S)
        load(places, pages)

    monkeypatch.setattr(hosted.memory, "load", late)
    hosted.tiers.fetch(100, key_of(16), 0, pages(10, 4))
    hosted.tiers.keep(101, key_of(16, 2), 0, pages(20, 4))
    assert hosted.found(key_of(16)) == 16
    may_load.set()
    (landed,) = hosted.news().landed
    assert landed.num_tokens == 16
    assert same(hosted.content(pages(10, 4)), content)
    assert hosted.found(key_of(16, 2)) == 0


def test_a_flush_empties_the_host_and_not_the_folder(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    hosted.write(key_of(16), pages(0, 4))
    hosted.until(lambda: not hosted.tiers._below.writes)
    hosted.tiers.keep(90, key_of(16, 2), 0, pages(4, 4))  # under way
    hosted.tiers.flush()
    hosted.news()
    hosted.until(lambda: not hosted.tiers._jobs)
    assert hosted.tiers.report().host_blocks == 0
    assert len(hosted.tiers._blocks.unused) == 8
    assert hosted.read(key_of(16), pages(8, 4)).num_from_host == 0
    assert hosted.read(key_of(16), pages(8, 4)).num_from_host == 16


def test_a_copy_whose_pages_were_taken_away_is_not_kept() -> None:
    hosted = Hosted()
    hosted.tiers.keep(1, key_of(16), 0, pages(0, 4))
    hosted.tiers.cancel(1)
    hosted.until(lambda: not hosted.tiers._jobs)
    assert hosted.found(key_of(16)) == 0
    hosted.write(key_of(16), pages(0, 4))
    hosted.tiers.fetch(7, key_of(16), 0, pages(8, 4))
    hosted.tiers.cancel(7)
    (landed,) = hosted.news().landed
    assert landed.num_tokens in (0, 16)
    assert hosted.found(key_of(16)) == 16


def test_a_copy_whose_pages_are_taken_away_in_the_midst_of_it_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = Hosted()
    save = hosted.memory.save
    has_begun = threading.Event()
    may_save = threading.Event()

    def late(pages: IntArray, places: IntArray) -> None:
        has_begun.set()
        assert may_save.wait(HANG_S)
        save(pages, places)

    monkeypatch.setattr(hosted.memory, "save", late)
    hosted.tiers.keep(1, key_of(16), 0, pages(0, 4))
    assert has_begun.wait(HANG_S)
    hosted.tiers.cancel(1)
    may_save.set()
    hosted.until(lambda: not hosted.tiers._jobs)
    assert hosted.found(key_of(16)) == 0


@pytest.mark.parametrize("num_copied", [0, 3])
def test_a_copy_that_fails_is_counted_and_nothing_of_it_is_found(
    monkeypatch: pytest.MonkeyPatch, num_copied: int
) -> None:
    """`num_copied`: pages that are copied before it fails."""
    hosted = Hosted()

    def fails(direction: Callable[[IntArray, IntArray], None]) -> None:
        def copy(one: IntArray, other: IntArray) -> None:
            direction(one[:num_copied], other[:num_copied])
            raise MemoryError("no more")

        monkeypatch.setattr(hosted.memory, direction.__name__, copy)

    fails(hosted.memory.save)
    assert hosted.write(key_of(16), pages(0, 4)).num_bytes == 0
    assert hosted.found(key_of(16)) == 0
    assert hosted.tiers.report().faults == 1
    assert len(hosted.tiers._blocks.unused) == 8
    monkeypatch.undo()
    content = hosted.fill(pages(0, 4), 1)
    hosted.write(key_of(16), pages(0, 4))
    fails(hosted.memory.load)
    assert hosted.read(key_of(16), pages(8, 4)).num_tokens == 0
    assert hosted.tiers.report().faults == 2
    monkeypatch.undo()
    assert hosted.read(key_of(16), pages(8, 4)).num_tokens == 16
    assert same(hosted.content(pages(8, 4)), content)
    assert hosted.tiers.report().faults == 2


def test_other_weights_find_nothing_and_all_places_come_back() -> None:
    hosted = Hosted()
    hosted.write(key_of(24), pages(0, 6))
    hosted.tiers.fetch(50, key_of(24), 0, pages(8, 6))  # under way
    hosted.tiers.renew("other weights")
    assert hosted.found(key_of(24)) == 0
    hosted.news()
    hosted.tiers.settle()
    assert len(hosted.tiers._blocks.unused) == 8
    assert hosted.tiers.take().has_opened
    hosted.write(key_of(24), pages(0, 6))
    hosted.tiers.clear()
    assert hosted.found(key_of(24)) == 0
    assert len(hosted.tiers._blocks.unused) == 8
    hosted.tiers.stop("for a test")
    assert hosted.write(key_of(24), pages(0, 6)).num_bytes == 0


def test_what_the_host_has_no_room_for_is_on_disk(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    expected = []
    for seed in range(6):
        expected.append(hosted.fill(pages(0, 4), seed))
        hosted.write(key_of(16, seed), pages(0, 4))
        hosted.until(lambda: not hosted.tiers._below.writes)
    assert hosted.tiers.report().host_blocks == 8
    assert len(list(tmp_path.rglob("*.kv"))) == 12
    for seed in range(6):
        assert hosted.found(key_of(16, seed)) == 16
        landed = hosted.read(key_of(16, seed), pages(20, 4))
        assert landed.num_tokens == 16
        assert landed.num_from_host == 0
        assert same(hosted.content(pages(20, 4)), expected[seed])
    # What was read is in the memory of the host now.
    assert hosted.read(key_of(16, 5), pages(30, 4)).num_from_host == 16
    hosted.tiers.settle()

    again = Hosted(tmp_path)
    assert again.found(key_of(16, 2)) == 16
    again.read(key_of(16, 2), pages(8, 4))
    assert same(again.content(pages(8, 4)), expected[2])
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert again.read(key_of(16, 3), pages(8, 4)).num_tokens == 0
    assert again.tiers.report().faults == 1
    assert again.read(key_of(16, 2), pages(8, 4)).num_tokens == 16
    assert len(again.tiers._blocks.unused) + again.tiers.report().host_blocks == 8


def test_a_disk_that_fails_takes_nothing_of_the_host_away(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    hosted.fill(pages(0, 4), 1)
    hosted.write(key_of(16), pages(0, 4))
    hosted.until(lambda: not hosted.tiers._below.writes)
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert hosted.read(key_of(16), pages(8, 4)).num_from_host == 16
