"""KV in files: what is written is found, also by another process; whatever is wrong with a file, it
is not."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.tiers.pool import (
    BLOCK_LEN,
    FINGERPRINT,
    HANG_S,
    BytesPool,
    WaitedTiers,
    key_of,
    pages,
)
from weft.memory.prefix_cache import CacheKey
from weft.tiers.disk.files import ALIGNMENT
from weft.tiers.disk.index import BlockIndex
from weft.tiers.disk.writer import FLOOR_BYTES, WRITTEN_SHARE, rest_s
from weft.tiers.keys import digest_of_files

BLOCK_BYTES = ALIGNMENT + 2 * BytesPool.page_bytes


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.fixture
def stored(tmp_path: Path) -> bytes:
    """Three blocks of `key_of(24)` below the folder. Returns their content."""
    tiers = WaitedTiers(tmp_path).opened()
    content = tiers.pool.fill(pages(5, 6), 1)
    assert tiers.write(key_of(24), pages(5, 6)).num_bytes == 3 * BLOCK_BYTES
    return content


class FrozenClock:
    """The time, which moves by `tick_s` whenever somebody looks at the clock."""

    def __init__(self) -> None:
        self.tick_s = 0.0
        self._now_s = 1_000.0

    def monotonic(self) -> float:
        self._now_s += self.tick_s
        return self._now_s

    @staticmethod
    def time_ns() -> int:
        return time.time_ns()

    @staticmethod
    def sleep(seconds: float) -> None:
        pass


def test_what_one_process_has_written_another_one_finds(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 24
    assert tiers.seek(0, key_of(24), 20, 20).num_tokens == 24
    assert tiers.seek(0, key_of(24), 24, 24).num_tokens == 0
    assert tiers.lacks(key_of(24)).num_tokens == 24
    assert tiers.read(key_of(24), pages(30, 6)).num_tokens == 24
    assert tiers.pool.content(pages(30, 6)) == stored
    assert tiers.read(key_of(24), pages(40, 4), start=8).num_tokens == 16
    assert tiers.pool.content(pages(40, 4)) == stored[2 * BytesPool.page_bytes :]
    report = tiers.report()
    assert report.state == "open"
    assert report.num_blocks == 3
    assert report.faults == 0


def test_only_whole_blocks_of_the_same_beginning_are_found(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    key = key_of(24)
    other = CacheKey("", key.tokens[:40] + b"\1\2\3\4" + key.tokens[44:])
    assert tiers.seek(0, other, 0, 0).num_tokens == 8
    assert tiers.seek(0, CacheKey("", key.tokens[: 15 * 4]), 0, 0).num_tokens == 8
    assert tiers.seek(0, CacheKey("", key.tokens[4:]), 0, 0).num_tokens == 0


def test_nobody_else_finds_it(tmp_path: Path, stored: bytes) -> None:
    assert (
        WaitedTiers(tmp_path).opened().seek(0, key_of(24, namespace="salt"), 0, 0).num_tokens == 0
    )
    other = WaitedTiers(tmp_path, fingerprint=b"g" * 32).opened()
    assert other.seek(0, key_of(24), 0, 0).num_tokens == 0
    assert other.report().num_blocks == 0
    assert other.report().num_bytes == 3 * BLOCK_BYTES


def test_files_are_for_their_owner_alone(tmp_path: Path, stored: bytes) -> None:
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def truncate(path: Path, rng: random.Random) -> None:
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    # What is between the header and the pages says nothing.
    place = rng.choice([rng.randrange(92), rng.randrange(ALIGNMENT, len(content))])
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.choice([0, ALIGNMENT])
    content[start:] = bytes(len(content) - start)
    path.write_bytes(content)


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 9_000)))


def fill(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def be_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm",
    [truncate, flip, zero, extend, fill, remove, link, be_a_folder],
    ids=lambda f: f.__name__,
)
def test_a_damaged_file_is_a_miss(tmp_path: Path, stored: bytes, harm) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(harm.__name__)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path, whole)
    for number in range(12):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        tiers = WaitedTiers(folder).opened()
        key = key_of(24)
        harmed = rng.randrange(3)
        (path,) = [one for one in files(folder) if one.name == block_name(key, harmed)]
        harm(path, rng)
        landed = tiers.read(key, pages(30, 6))
        assert landed.num_tokens == harmed * BLOCK_LEN
        end = harmed * 2 * BytesPool.page_bytes
        assert tiers.pool.content(pages(30, 2 * harmed)) == stored[:end]
        assert tiers.report().faults == 1
        # It is not asked for again.
        assert tiers.seek(0, key, 0, 0).num_tokens == harmed * BLOCK_LEN


def block_name(key: CacheKey, number: int) -> str:
    from weft.tiers.keys import KeyChain

    return list(KeyChain(FINGERPRINT, BLOCK_LEN).keys(key))[number].hex() + ".kv"


def test_files_that_were_swapped_are_misses(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    first, second, third = files(tmp_path)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(third.read_bytes())
    third.write_bytes(content)
    assert tiers.read(key_of(24), pages(30, 6)).num_tokens == 0


def test_a_block_that_is_damaged_is_written_again(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    flip(files(tmp_path)[0], random.Random(1))
    for _ in range(3):
        tiers.read(key_of(24), pages(30, 6))
    tiers.pool.fill(pages(5, 6), 1)
    assert tiers.write(key_of(24), pages(5, 6)).num_bytes == BLOCK_BYTES
    assert tiers.read(key_of(24), pages(30, 6)).num_tokens == 24
    assert tiers.pool.content(pages(30, 6)) == stored


def test_what_is_not_used_for_longest_goes_when_there_is_no_room(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path, max_bytes=4 * BLOCK_BYTES).opened()
    for seed in range(4):
        tiers.write(key_of(8, seed), pages(0, 2))
    tiers.read(key_of(8, 0), pages(10, 2))
    tiers.write(key_of(8, 4), pages(0, 2))
    found = [tiers.seek(0, key_of(8, seed), 0, 0).num_tokens for seed in range(5)]
    assert found == [8, 0, 8, 8, 8]
    assert len(files(tmp_path)) == 4
    assert tiers.report().dropped_blocks == 1


def test_of_what_is_longer_than_there_is_room_the_beginning_stays(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path, max_bytes=4 * BLOCK_BYTES).opened()
    tiers.write(key_of(16), pages(0, 4))
    tiers.write(key_of(8, 1), pages(0, 2))
    # What is written behind a beginning uses that.
    assert tiers.write(key_of(64), pages(4, 12), 16).num_bytes == 2 * BLOCK_BYTES
    assert tiers.seek(0, key_of(64), 0, 0).num_tokens == 32
    assert tiers.write(key_of(64), pages(8, 8), 32).num_bytes == 0
    assert tiers.seek(0, key_of(64), 0, 0).num_tokens == 32
    assert tiers.seek(0, key_of(8, 1), 0, 0).num_tokens == 0


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    for seed in range(4):
        tiers.write(key_of(8, seed), pages(0, 2))
    now = time.time()
    for path in files(tmp_path):
        os.utime(path, (now - 1_000, now - 1_000))
    again = WaitedTiers(tmp_path, max_bytes=4 * BLOCK_BYTES).opened()
    again.read(key_of(8, 2), pages(10, 2))
    last = WaitedTiers(tmp_path, max_bytes=2 * BLOCK_BYTES).opened()
    last.write(key_of(8, 9), pages(0, 2))
    assert last.seek(0, key_of(8, 2), 0, 0).num_tokens == 8
    assert last.report().num_blocks == 2


@pytest.mark.parametrize("last", ["write", "read", "restart", "write again"])
def test_of_a_sequence_the_end_goes_first(tmp_path: Path, last: str) -> None:
    long = key_of(24)
    tiers = WaitedTiers(tmp_path, max_bytes=3 * BLOCK_BYTES).opened()
    tiers.write(long, pages(0, 6))
    if last == "read":
        tiers.read(long, pages(10, 6))
    elif last == "write again":
        tiers.write(long, pages(0, 6))
    elif last == "restart":
        tiers = WaitedTiers(tmp_path, max_bytes=3 * BLOCK_BYTES).opened()
    for seed in (1, 2):
        tiers.write(key_of(8, seed), pages(0, 2))
        assert tiers.seek(0, long, 0, 0).num_tokens == 24 - 8 * seed


def test_what_another_server_has_used_since_stays_longer(tmp_path: Path) -> None:
    index = BlockIndex(tmp_path)
    keys = [bytes([number]) * 32 for number in range(3)]
    for number, key in enumerate(keys):
        path = index.path("0" * 16, key)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"content")
        os.utime(path, (1_000 + number, 1_000 + number))
    index.scan()
    assert index.oldest() == keys[0]
    os.utime(index.path("0" * 16, keys[0]), (2_000, 2_000))
    index.scan()
    assert index.oldest() == keys[1]
    new = bytes([9]) * 32
    path = index.path("0" * 16, new)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"content")
    os.utime(path, (500, 500))
    index.scan()
    assert index.oldest() == new


def test_a_look_at_the_folder_forgets_no_use_that_is_not_noted_there(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path, max_bytes=4 * BLOCK_BYTES).opened()
    for seed in range(4):
        tiers.write(key_of(8, seed), pages(0, 2))
    tiers.read(key_of(8, 0), pages(10, 2))
    tiers._index.scan()
    tiers.write(key_of(8, 4), pages(0, 2))
    assert tiers.seek(0, key_of(8, 0), 0, 0).num_tokens == 8


def test_servers_that_share_a_folder_leave_its_size_as_it_is(tmp_path: Path) -> None:
    most = 4 * WRITTEN_SHARE
    both = [WaitedTiers(tmp_path, max_bytes=most * BLOCK_BYTES).opened() for _ in range(2)]
    for seed in range(most):
        both[seed % 2].write(key_of(16, seed), pages(0, 4))
    # Each looks after a small part of the room what the other one has written.
    assert most <= len(files(tmp_path)) <= most + 2 * most // WRITTEN_SHARE
    last_but_few = key_of(16, most - 2 * WRITTEN_SHARE + 1)
    assert both[0].seek(0, last_but_few, 0, 0).num_tokens == 16


def test_how_long_a_read_takes_is_learnt_from_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    tiers.write(key_of(16), pages(0, 4))
    clock = FrozenClock()
    monkeypatch.setattr("weft.tiers.disk.reader.time", clock)
    at_first = tiers.seek(0, key_of(16), 0, 0).read_s
    tiers.read(key_of(16), pages(10, 4))  # in no time
    fast = tiers.seek(0, key_of(16), 0, 0).read_s
    assert 0 < fast < at_first
    clock.tick_s = 100.0
    for _ in range(8):
        tiers.read(key_of(16), pages(10, 4))
    assert tiers.seek(0, key_of(16), 0, 0).read_s > at_first


def test_a_block_larger_than_all_room_is_not_written(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path, max_bytes=100).opened()
    assert tiers.write(key_of(8), pages(0, 2)).num_bytes == 0
    assert not files(tmp_path)


def test_a_full_file_system_is_not_written_to(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path, floor_bytes=1 << 62).opened()
    assert tiers.write(key_of(8), pages(0, 2)).num_bytes == 0
    assert tiers.report().faults == 1
    assert not files(tmp_path)


@pytest.mark.parametrize("lacking", [-BLOCK_BYTES, 0, 1, 2 * BLOCK_BYTES, FLOOR_BYTES])
def test_the_store_of_a_server_leaves_a_gigabyte_of_its_file_system_free(
    lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 1_000_000_000 + BLOCK_BYTES - lacking

    class Status:
        f_bavail = free_bytes
        f_frsize = 1

    tiers = WaitedTiers(tmp_path, floor_bytes=None).opened()
    monkeypatch.setattr("weft.tiers.disk.writer.os.statvfs", lambda folder: Status)
    written = tiers.write(key_of(8), pages(0, 2)).num_bytes
    assert written == (BLOCK_BYTES if lacking <= 0 else 0)
    assert len(files(tmp_path)) == (lacking <= 0)
    assert tiers.report().faults == (lacking > 0)


def test_a_write_that_fails_is_followed_by_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = WaitedTiers(tmp_path).opened()

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert tiers.write(key_of(8), pages(0, 2)).num_bytes == 0
    assert tiers.write(key_of(8, 1), pages(0, 2)).num_bytes == 0
    assert tiers.report().faults == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    tiers._writer.rests_until_s = 0.0
    assert tiers.write(key_of(8), pages(0, 2)).num_bytes == BLOCK_BYTES


def test_a_folder_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    tiers = WaitedTiers(folder).opened()
    tiers.write(key_of(8), pages(0, 2))
    shutil.rmtree(folder)
    assert tiers.read(key_of(8), pages(10, 2)).num_tokens == 0
    assert tiers.write(key_of(8), pages(0, 2)).num_bytes == BLOCK_BYTES
    assert tiers.read(key_of(8), pages(10, 2)).num_tokens == 8
    (block,) = files(folder)
    made = [path for path in block.parents if path.is_relative_to(folder)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_what_a_killed_process_left_is_removed_and_others_writes_are_not(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    tiers.write(key_of(8), pages(0, 2))
    (path,) = files(tmp_path)
    old = path.with_name(f"{path.name}.1.tmp")
    new = path.with_name(f"{path.name}.2.tmp")
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1, 1))
    WaitedTiers(tmp_path).opened()
    assert not old.exists()
    assert new.exists()


def test_a_cancelled_write_stores_nothing_that_comes_later(tmp_path: Path) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    real = os.pwritev

    def slow(handle: int, pieces: list[memoryview], offset: int) -> int:
        tiers.cancel(77)
        tiers.pool.fill(pages(0, 4), 9)  # the pages are somebody else's now
        return real(handle, pieces, offset)

    tiers.pool.fill(pages(0, 4), 1)
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "pwritev", slow)
    tiers.keep(77, key_of(16), 0, pages(0, 4))
    deadline = time.monotonic() + 30
    while tiers._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    patch.undo()
    assert not tiers.take().written
    assert not files(tmp_path)
    assert tiers.seek(0, key_of(16), 0, 0).num_tokens == 0


def test_clear_removes_all_files(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    tiers.clear()
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 0
    tiers.write(key_of(8, 3), pages(0, 2))
    assert len(files(tmp_path)) == 1
    assert tiers.report().num_bytes == BLOCK_BYTES


def test_a_store_that_was_stopped_finds_and_writes_nothing(tmp_path: Path, stored: bytes) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    tiers.stop("for a test")
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 0
    assert tiers.read(key_of(24), pages(0, 6)).num_tokens == 0
    assert tiers.write(key_of(8, 3), pages(0, 2)).num_bytes == 0
    assert tiers.report().state == "for a test"


def test_after_new_weights_nothing_of_the_old_is_found_until_they_are_back(
    tmp_path: Path, stored: bytes
) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    tiers.fingerprint = b"n" * 32
    tiers.renew("for a test")
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 0
    tiers.opened()
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 0
    assert tiers.write(key_of(8), pages(0, 2)).num_bytes == BLOCK_BYTES
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 8
    assert tiers.report().num_blocks == 1
    tiers.fingerprint = FINGERPRINT
    tiers.renew("for a test")
    tiers.opened()
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 24
    assert tiers.read(key_of(24), pages(30, 6)).num_tokens == 24
    assert tiers.pool.content(pages(30, 6)) == stored


def test_of_new_weights_that_come_in_a_row_only_the_last_count(
    tmp_path: Path, stored: bytes
) -> None:
    tiers = WaitedTiers(tmp_path).opened()
    may_go_on = threading.Event()
    for name in (b"a", FINGERPRINT[:1]):
        tiers.identify = partial(_slowly, may_go_on, name * 32)
        tiers.renew("for a test")
    # What was asked for before goes on under the weights of its time.
    tiers.keep(1_000, key_of(8, 5), 0, pages(0, 2))
    may_go_on.set()
    tiers.opened()
    assert tiers.seek(0, key_of(24), 0, 0).num_tokens == 24
    assert tiers.seek(0, key_of(8, 5), 0, 0).num_tokens == 0


def _slowly(may_go_on: threading.Event, fingerprint: bytes) -> bytes:
    assert may_go_on.wait(HANG_S)
    return fingerprint


def test_blocks_are_written_slowly_beside_requests_and_fast_without() -> None:
    assert rest_s(0.001, 0.01) == pytest.approx(0.009)
    assert rest_s(1.0, 0.01) == 0.02
    assert rest_s(0.001, 1.0) == 0.0


def test_weights_that_cannot_be_read_leave_it_closed(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise OSError(5, "Input/output error")

    tiers = WaitedTiers(tmp_path, identify=fail)
    deadline = time.monotonic() + 30
    while "could not be read" not in tiers.report().state:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert tiers.seek(0, key_of(8), 0, 0).num_tokens == 0


def test_the_digest_of_weights_is_remembered_until_they_change(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    known = tmp_path / "weights.json"
    first = digest_of_files([weights], known)
    assert digest_of_files([weights], known) == first
    content = known.read_text()
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    weights.write_bytes(b"two")
    assert digest_of_files([weights], known) != first
    for broken in ("", "[]", '{"a": "xyz"}', "\0"):
        known.write_text(broken)
        weights.write_bytes(b"one")
        assert digest_of_files([weights], known) == first
    assert content
