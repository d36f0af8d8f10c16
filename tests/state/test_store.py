"""The store of what outlives a server: what is told to be on disk is there, whole, and nobody
else's."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.state import writer
from weft.state.store import FILE, FORMAT, StateError, StateStore, _Unwritten, _Write

KILLS = 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path / "state", clock=lambda: 1_000.0)
    yield store
    store.close()


def names(store: StateStore, kind: str = "response") -> list[str]:
    return [one.name for one in store.read(kind) if not one.part]


def test_what_was_put_is_there_for_the_next_server(tmp_path: Path) -> None:
    first = StateStore(tmp_path, clock=lambda: 5.0)
    first.put("response", "alice", "a", {"": b"head", "history": b"long"})
    first.put("response", "", "b", {"": b"of nobody"})
    first.put("session", "alice", "a", {"": b"another kind"})
    first.put("response", "alice", "a", {"": b"newer"})
    first.delete("response", "", "none")
    first.close()
    second = StateStore(tmp_path)
    assert [tuple(one) for one in second.read("response")] == [
        ("alice", "a", "", 5.0, b"newer"),
        ("alice", "a", "history", 5.0, b"long"),
        ("", "b", "", 5.0, b"of nobody"),
    ]
    second.delete("response", "bob", "a")  # of somebody else
    second.put("response", "alice", "a", {}, without=["history"])
    second.close()
    third = StateStore(tmp_path)
    assert [(one.name, one.part) for one in third.read("response")] == [("a", ""), ("b", "")]
    third.close()


def test_what_comes_while_the_disk_works_is_one_transaction(store: StateStore) -> None:
    async def many() -> None:
        # The thread is kept by a question, so all that follows waits for it.
        loop = asyncio.get_running_loop()
        gate = loop.create_future()

        def keep(connection: sqlite3.Connection) -> None:
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(gate, 60), loop).result()

        kept = asyncio.create_task(store.ask(keep))
        await asyncio.sleep(0)
        for number in range(500):
            store.put("response", "", f"r{number}", {"": b"x"})
        gate.set_result(None)
        await kept
        await store.settled()

    asyncio.run(many())
    assert len(names(store)) == 500
    assert store.num_commits <= 2


def test_nobody_waits_when_there_is_nothing_to_write(store: StateStore) -> None:
    async def wait() -> None:
        await store.settled()
        store.put("response", "", "a", {"": b"x"})
        await store.settled()
        await store.settled()

    asyncio.run(wait())
    assert store.num_commits == 1


def test_a_record_that_could_not_be_written_is_an_error_and_is_written_later(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StateStore._commit
    full = [True]

    def commit(self: StateStore, writes: list[object]) -> None:
        if full[0]:
            raise sqlite3.OperationalError("database or disk is full")
        real(self, writes)  # type: ignore[arg-type]

    monkeypatch.setattr(StateStore, "_commit", commit)
    monkeypatch.setattr("weft.state.store.RETRY_S", 0.01)

    async def fill() -> None:
        store.put("response", "alice", "a", {"": b"old", "history": b"h"})
        store.put("response", "alice", "gone", {"": b"x"})
        with pytest.raises(StateError, match="disk is full"):
            await store.settled()
        store.put("response", "alice", "a", {"": b"new", "history": b"h"})
        store.delete("response", "alice", "gone")
        with pytest.raises(StateError, match="disk is full"):
            await store.settled()
        full[0] = False
        await store.settled()  # by itself, without another record

    asyncio.run(fill())
    assert [(one.name, one.part, one.body) for one in store.read("response")] == [
        ("a", "", b"new"),
        ("a", "history", b"h"),
    ]


def _take_nothing(monkeypatch: pytest.MonkeyPatch, exc: Exception) -> list[bool]:
    """While the first element of the result is true, no commit succeeds."""
    real = StateStore._commit
    full = [True]

    def commit(self: StateStore, writes: Any) -> None:
        if full[0]:
            raise exc
        real(self, writes)

    monkeypatch.setattr(StateStore, "_commit", commit)
    monkeypatch.setattr("weft.state.store.RETRY_S", 0.01)
    return full


@pytest.mark.parametrize(("num_bytes", "num"), [(10, 100), (1_000, 2)])
def test_what_was_taken_is_kept_and_what_begins_is_refused_when_too_much_waits(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, num_bytes: int, num: int
) -> None:
    async def fill() -> None:
        store.put("response", "", "gone", {"": b"x"})
        await store.settled()
        full = _take_nothing(monkeypatch, sqlite3.OperationalError("database or disk is full"))
        monkeypatch.setattr("weft.state.store.MAX_UNWRITTEN_BYTES", num_bytes)
        monkeypatch.setattr("weft.state.store.MAX_UNWRITTEN", num)
        store.require_room()
        store.delete("response", "", "gone")
        for name in "abc":
            store.put("response", "", name, {"": b"12345"})
        with pytest.raises(StateError, match="disk is full"):
            await store.settled()
        with pytest.raises(StateError, match="too much waits"):
            store.require_room()
        full[0] = False
        await asyncio.wait_for(store.settled(), 60)
        store.require_room()

    asyncio.run(fill())
    assert names(store) == ["a", "b", "c"], "what was deleted has not come back"


def test_changes_of_a_record_that_wait_are_one_change(store: StateStore) -> None:
    unwritten = _Unwritten()
    record = ("session", "", "s")
    for number in range(1_000):
        unwritten.add(_Write(record, False, 1.0, {"": b"head", f"turn {number}": b"12345678"}))
        unwritten.add(_Write(record, False, 1.0, {f"turn {number - 1}": None}))
        unwritten.add(_Write(("response", "", str(number)), False, 1.0, {"": b"x"}))
        unwritten.add(_Write(("response", "", str(number)), True, 0.0, {}))
    assert unwritten._num_bytes == len(b"head12345678")
    assert len(unwritten) == 1_001
    unwritten.add(_Write(record, True, 2.0, {"": b"new"}))
    assert [one.parts for one in unwritten if one.record == record] == [{"": b"new"}]
    assert unwritten._num_bytes == len(b"new")


def test_a_part_that_comes_back_while_it_waits_is_the_last_one(store: StateStore) -> None:
    async def write() -> None:
        first = _Write(("session", "", "s"), True, 1.0, {"": b"h", "a": b"1", "b": b"2"})
        again = _Write(first.record, False, 1.0, {"a": None})
        last = _Write(first.record, False, 1.0, {"b": b"3", "a": b"4"})
        store._send(first.then(again).then(last))
        await store.settled()

    asyncio.run(write())
    assert [(one.part, one.body) for one in store.read("session")] == [
        ("", b"h"),
        ("b", b"3"),
        ("a", b"4"),
    ]


def test_a_disk_that_takes_nothing_is_tried_once_for_all_that_waits(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [0]

    def commit(self: StateStore, writes: Any) -> None:
        tries[0] += 1
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(StateStore, "_commit", commit)

    async def fail() -> None:
        store.put("response", "", "a", {"": b"x"})
        with pytest.raises(StateError):
            await store.settled()
        for number in range(1_000):
            store.delete("response", "", str(number))
        with pytest.raises(StateError):
            await store.settled()

    asyncio.run(fail())
    assert tries[0] <= 4, "not one for each change"


def test_any_error_is_told_to_all_that_wait(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = _take_nothing(monkeypatch, ValueError("of no database"))

    def ask(connection: sqlite3.Connection) -> None:
        raise LookupError("of no database")

    async def fail() -> None:
        store.put("response", "", "a", {"": b"x"})
        with pytest.raises(StateError, match="of no database"):
            await asyncio.wait_for(store.settled(), 60)
        with pytest.raises(StateError, match="could not be read: of no database"):
            await asyncio.wait_for(store.ask(ask), 60)
        full[0] = False
        await asyncio.wait_for(store.settled(), 60)

    asyncio.run(fail())
    assert names(store) == ["a"]


def test_counts_tell_number_bytes_and_ages(tmp_path: Path) -> None:
    now = [100.0]
    store = StateStore(tmp_path, clock=lambda: now[0])

    async def count() -> None:
        store.put("response", "", "a", {"": b"12345", "history": b"678"})
        now[0] = 160.0
        store.put("response", "", "b", {"": b"9"})
        store.put("session", "", "s", {"": b"0", "turn t": b"12"})
        now[0] = 170.0
        found = [
            (one.kind, one.records, one.bytes, one.oldest_s, one.newest_s)
            for one in await store.counts()
        ]
        assert found == [("response", 2, 9, 70.0, 10.0), ("session", 1, 3, 10.0, 10.0)]
        assert await store.unused("response", 60.0) == [("", "a")]

    asyncio.run(count())
    store.close()


def test_deleted_records_give_their_room_back(tmp_path: Path) -> None:
    store = StateStore(tmp_path)

    async def fill() -> None:
        for number in range(100):
            store.put("response", "", f"r{number}", {"": b"s3cret" * 10_000})
        await store.settled()
        await store.give_back()
        assert (tmp_path / FILE).stat().st_size > 5_000_000
        for number in range(100):
            store.delete("response", "", f"r{number}")
        await store.settled()
        await store.give_back()

    asyncio.run(fill())
    store.close()
    assert (tmp_path / FILE).stat().st_size < 100_000
    assert b"s3cret" not in (tmp_path / FILE).read_bytes()


# Files that cannot be used


def test_two_servers_do_not_share_a_folder(store: StateStore) -> None:
    with pytest.raises(StateError, match="is in use by another server"):
        StateStore(store.folder)


def test_only_its_user_may_read_it(store: StateStore) -> None:
    assert store.folder.stat().st_mode & 0o777 == 0o700
    for file in store.folder.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file


@pytest.mark.parametrize(
    ("version", "expected"),
    [(FORMAT + 1, "of a newer weft; this one reads"), (FORMAT - 1, "of an older weft")],
)
def test_another_format_is_one_clear_line_and_nothing_is_lost(
    tmp_path: Path, version: int, expected: str
) -> None:
    store = StateStore(tmp_path)
    store.put("response", "", "a", {"": b"x"})
    store.close()
    _execute(tmp_path, f"PRAGMA user_version = {version}")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StateError, match=expected) as refused:
        StateStore(tmp_path)
    assert "\n" not in str(refused.value)
    assert (tmp_path / FILE).read_bytes() == before
    _execute(tmp_path, f"PRAGMA user_version = {FORMAT}")
    again = StateStore(tmp_path)
    assert names(again) == ["a"]
    again.close()


def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    _execute(tmp_path, "CREATE TABLE records (a)")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StateError, match="is a database of another program"):
        StateStore(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_damaged_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database " * 1_000)
    with pytest.raises(StateError, match=r"is damaged: .*; move it away to begin"):
        StateStore(tmp_path)
    (tmp_path / FILE).unlink()
    store = StateStore(tmp_path)  # the lock was given back
    for number in range(200):
        store.put("response", "", f"r{number}", {"": b"x" * 500})
    store.close()
    file = tmp_path / FILE
    content = bytearray(file.read_bytes())
    content[8192:16384] = bytes(8192)
    file.write_bytes(content)
    with pytest.raises(StateError, match="is damaged") as raised:
        StateStore(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_whole_but_cannot_be_used_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody moves a whole state away because another program looks into it."""
    StateStore(tmp_path).close()
    monkeypatch.setattr("weft.state.store.BUSY_S", 0.0)
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StateError, match=r"cannot be used: .*locked") as refused:
        StateStore(tmp_path)
    assert "move it away" not in str(refused.value)
    other.close()
    StateStore(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be used"):
        StateStore(tmp_path / "file" / "state")


def _execute(folder: Path, sql: str) -> None:
    connection = sqlite3.connect(folder / FILE)
    connection.execute(sql)
    connection.commit()
    connection.close()


# Crashes


def test_after_twenty_kills_nothing_told_is_lost_and_nothing_is_half_written(
    tmp_path: Path,
) -> None:
    """Each writer continues where the one before was killed, at a moment of its own."""
    chance = random.Random(36)
    told = -1
    for kill in range(KILLS):
        told = (
            _write_and_kill(
                tmp_path, told + 1, num_lines=chance.randint(0, 3), wait_s=chance.random() * 0.01
            )
            or told
        )
        store = StateStore(tmp_path)
        parts: dict[str, dict[str, bytes]] = {}
        for one in store.read("response"):
            number = int(one.name[1:])
            assert one.owner == writer.owner(number)
            assert one.body == writer.body(number, one.part), f"kill {kill}"
            parts.setdefault(one.name, {})[one.part] = one.body
        assert all(set(of) == {"", "history"} for of in parts.values()), f"kill {kill}"
        numbers = sorted(int(name[1:]) for name in parts)
        if told >= 0:
            assert set(range(max(told - 1, 0), told + 1)) <= set(numbers), f"kill {kill}"
            # What was deleted before the last told record has gone.
            assert min(numbers) >= told - 5
        store.close()
        told = max(numbers, default=-1)
    assert told > KILLS


def _write_and_kill(folder: Path, first: int, num_lines: int, wait_s: float) -> int | None:
    """The number of the last record that the writer told, before it was killed; None if none."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.state.writer", str(folder), str(first)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = [process.stdout.readline() for _ in range(num_lines)]
    if not num_lines:  # somewhere in its start
        wait_s *= 20
    time.sleep(wait_s)
    process.kill()
    found += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    whole = [line for line in found if line.endswith("\n")]
    return int(whole[-1]) if whole else None
