"""The folder of the weights cache: a file is found as it was written, or not at all; there is never
more than was allowed; and what a process uses stays."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from weft.weights.cache import folder as cache_folder
from weft.weights.cache.file import CHUNK, Bytes
from weft.weights.cache.folder import WeightsCache, WeightsKey

LARGE = 100 * CHUNK


def key_of(number: int) -> WeightsKey:
    return WeightsKey(f"Model {number}", {"number": number, "files": [["/a/b", 5]]})


def blocks_of(number: int, num_bytes: int = CHUNK + 1_000) -> list[Bytes]:
    random = np.random.default_rng(number)
    sizes = (num_bytes, 1, 64, 0, 4_097)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def store(cache: WeightsCache, number: int, num_bytes: int = CHUNK + 1_000) -> bool:
    with cache.making(key_of(number)) as may_store:
        assert may_store
        return cache.store(key_of(number), [number], blocks_of(number, num_bytes))


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "cache", LARGE)


def numbers_in(cache: WeightsCache, most: int = 9) -> list[int]:
    return [number for number in range(most) if cache.find(key_of(number)) is not None]


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, 9 * CHUNK, 20 * CHUNK + 77])
def test_blocks_come_back_as_they_were(cache: WeightsCache, num_bytes: int) -> None:
    assert cache.find(key_of(1)) is None
    assert store(cache, 1, num_bytes)
    mapped = cache.find(key_of(1))
    assert mapped is not None
    assert mapped.description["layout"] == [1]
    for found, block in zip(mapped.blocks, blocks_of(1, num_bytes), strict=True):
        assert np.array_equal(found, block)
        assert not len(found) or found.ctypes.data % 64 == 0
    assert cache.find(key_of(2)) is None


def test_only_this_user_may_read_them(cache: WeightsCache) -> None:
    store(cache, 1)
    [path] = cache.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    path.chmod(0o622)
    assert cache.find(key_of(1)) is None


def test_what_is_written_to_the_memory_does_not_reach_the_file(cache: WeightsCache) -> None:
    store(cache, 1)
    mine = cache.find(key_of(1))
    theirs = cache.find(key_of(1))
    assert mine is not None
    assert theirs is not None
    mine.blocks[0][:] = 7
    assert np.array_equal(theirs.blocks[0], blocks_of(1)[0])
    again = cache.find(key_of(1))
    assert again is not None
    assert np.array_equal(again.blocks[0], blocks_of(1)[0])


def damaged(path: Path) -> Iterator[bytes]:
    """Forms of a file that is cut, or has one wrong bit, or a page of zeros."""
    whole = path.read_bytes()
    places = random.Random(5)
    for length in (0, 15, 16, 55, 56, 300, CHUNK - 1, CHUNK, len(whole) - CHUNK, len(whole) - 1):
        yield whole[:length]
    yield whole + bytes(CHUNK)
    used = int.from_bytes(whole[16:24], "little") + 64  # with the sum of one chunk
    in_head = range(0, used, 7)
    for place in [*in_head, *(places.randrange(CHUNK, len(whole)) for _ in range(40))]:
        wrong = bytearray(whole)
        wrong[place] ^= 1 << places.randrange(8)
        yield bytes(wrong)
    begin = CHUNK + 4_096
    yield whole[:begin] + bytes(4_096) + whole[begin + 4_096 :]


def test_a_damaged_file_is_none_and_is_replaced(cache: WeightsCache) -> None:
    store(cache, 1, CHUNK // 2)
    [path] = cache.folder.iterdir()
    whole = path.read_bytes()
    for number, content in enumerate(damaged(path)):
        path.write_bytes(content)
        assert cache.find(key_of(1)) is None, number
    assert store(cache, 1, CHUNK // 2)
    assert path.read_bytes() == whole


def test_a_file_of_another_key_is_none(cache: WeightsCache) -> None:
    store(cache, 1)
    shutil.copy(cache.folder / key_of(1).file_name, cache.folder / key_of(2).file_name)
    assert cache.find(key_of(2)) is None


def test_a_link_is_none(cache: WeightsCache, tmp_path: Path) -> None:
    store(cache, 1)
    path = cache.folder / key_of(1).file_name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.find(key_of(1)) is None


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 9 * CHUNK)
    for number in range(3):  # three chunks each, with the head
        store(cache, number)
        os.utime(cache.folder / key_of(number).file_name, (number, number))
    assert cache.find(key_of(0)) is not None  # which makes it the last used
    gc.collect()
    assert store(cache, 3)
    assert numbers_in(cache) == [0, 2, 3]


def test_files_in_use_stay_whatever_comes(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 9 * CHUNK)
    kept = []
    for number in range(3):
        store(cache, number)
        kept.append(cache.find(key_of(number)))
    assert not store(cache, 3)
    assert numbers_in(cache) == [0, 1, 2]
    assert cache.clear() == (0, 3)
    assert all(file.is_used for file in cache.files())
    del kept[1]
    gc.collect()
    assert store(cache, 3)
    assert numbers_in(cache) == [0, 2, 3]


def test_a_model_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 3 * CHUNK)
    assert store(cache, 1)
    assert not store(cache, 2, 5 * CHUNK)
    assert numbers_in(cache) == [1]


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_part_of_the_disk_stays_free(
    cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 0, 5 * 10**7))
    assert not store(cache, 1)
    assert list(cache.folder.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(
    cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes, position: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        assert not store(cache, 1)
    assert list(cache.folder.iterdir()) == []
    assert store(cache, 1)


def test_what_a_killed_process_left_is_removed(
    cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.folder.mkdir()
    left = cache.folder / f".{key_of(1).file_name}.77.tmp"
    left.write_bytes(bytes(1_000))
    monkeypatch.setattr(cache_folder, "OLD_S", -1.0)
    assert store(cache, 2)
    assert not left.exists()


def test_who_waited_for_too_long_may_load_and_not_store(
    cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "WAIT_S", 0.0)
    with cache.making(key_of(1)) as may_store:
        assert may_store
        with cache.making(key_of(1)) as may_store_too:
            assert not may_store_too
        with cache.making(key_of(2)) as may_store_another:
            assert may_store_another
    with cache.making(key_of(1)) as may_store:
        assert may_store


def test_files_and_their_use_are_listed(cache: WeightsCache) -> None:
    assert cache.files() == []
    store(cache, 1)
    store(cache, 2)
    os.utime(cache.folder / key_of(2).file_name, (1, 1))
    mapped = cache.find(key_of(1))
    assert mapped is not None
    first, second = cache.files()
    assert (first.model, first.is_used, second.model, second.is_used) == (
        *("Model 1", True),
        *("Model 2", False),
    )
    assert first.num_bytes == mapped.num_bytes
    assert cache.clear() == (second.num_bytes, 1)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    path.chmod(0o500)
    try:
        yield
    finally:
        path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_folder_that_cannot_be_written_is_read(cache: WeightsCache) -> None:
    store(cache, 1)
    with unwritable(cache.folder):
        assert cache.find(key_of(1)) is not None
        with cache.making(key_of(2)) as may_store:
            assert not may_store
