"""Batches over a route that is played: each line has one result, whatever happens on the way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from weft.batches.files import BatchRefused, FileNotStored, StoredFiles
from weft.batches.forms.openai import OPENAI
from weft.batches.forms.protocol import RouteAnswer
from weft.batches.line_file import LineFile
from weft.batches.records import BatchRecord
from weft.batches.runner import WINDOW
from weft.batches.service import BatchService
from weft.config.limits import Limits
from weft.state.store import StateStore

PATH = "/v1/completions"


class Route:
    """Answers with the prompt; `statuses` has the statuses of the first tries of a prompt."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.statuses: dict[str, list[int]] = {}
        self.asked = Counter[str]()
        self.bodies: list[dict[str, Any]] = []
        self.quick: set[str] = set()  # prompts that do not wait for the gate
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, owner: str, path: str, body: bytes, rid: str) -> RouteAnswer:
        fields = json.loads(body)
        prompt = fields["prompt"]
        self.asked[prompt] += 1
        self.bodies.append(fields)
        if prompt not in self.quick:
            await self.gate.wait()
        if self.rng is not None:
            await asyncio.sleep(self.rng.choice([0, 0, 0.001]))
        left = self.statuses.get(prompt)
        status = left.pop(0) if left else 200
        return RouteAnswer(status, {"text": prompt}, rid)


def line(index: int, **changes: Any) -> str:
    fields = {"custom_id": f"c{index}", "method": "POST", "url": PATH}
    return json.dumps(fields | {"body": {"prompt": f"p{index}"}} | changes)


async def begun(
    service: BatchService, lines: list[str], owner: str = "alice", window_s: float = 3_600.0
) -> BatchRecord:
    id = service.files.new_id()
    service.files.path_of(id).write_text("\n".join(lines))
    file = service.files.add(id, owner, "in.jsonl", "batch")
    return await service.add_batch(
        owner,
        OPENAI,
        PATH,
        file,
        prefix="batch_",
        window="1h",
        window_s=window_s,
        metadata={},
    )


async def ended(batch: BatchRecord) -> None:
    async with asyncio.timeout(60):
        while batch.is_open:
            await asyncio.sleep(0.005)


def results(service: BatchService, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    return [json.loads(one) for one in service.files.path_of(id).read_text().splitlines()]


def service_of(folder: Path | None, route: Route, limits: Limits | None = None) -> BatchService:
    state = None if folder is None else StateStore(folder)
    service = BatchService(limits or Limits(), state)
    service.answer_with(route)
    return service


def close(service: BatchService) -> None:
    service.close()
    if service._state is not None:
        service._state.close()


def test_each_line_has_one_result_and_bad_lines_stop_nothing() -> None:
    async def run() -> None:
        route = Route()
        route.statuses = {"p3": [400], "p4": [503, 429, 200], "p5": [500, 500, 500]}
        service = service_of(None, route)
        lines = [line(index) for index in range(6)]
        lines += ["nonsense", line(0), line(7, method="GET"), line(8, url="/v1/other")]
        lines += [line(9, body={"prompt": "p9", "stream": True}), line(10, custom_id="")]
        lines += [line(11, body={"prompt": "p11", "background": True})]
        batch = await begun(service, lines)
        await ended(batch)
        assert batch.status == "completed"
        answered = results(service, batch.output_file)
        assert sorted(one["custom_id"] for one in answered) == ["c0", "c1", "c2", "c4"]
        failed = results(service, batch.error_file)
        messages = [str(one["error"] or one["response"]) for one in failed]
        parts = ("cannot be read", "earlier line", "'GET'", "'/v1/other'", "stream", "0 char")
        for part in (*parts, "background"):
            assert sum(part in message for message in messages) == 1, part
        assert batch.num_completed == 4
        assert batch.num_failed == 9
        assert batch.num_lines == 13
        assert all(body["service_tier"] == "flex" for body in route.bodies)
        close(service)

    asyncio.run(run())


def test_a_full_disk_is_tried_again_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        waits: list[float] = []
        num_full = 2
        append = LineFile.append
        sleep = asyncio.sleep

        def full_at_first(file: LineFile, lines: list[bytes]) -> None:
            nonlocal num_full
            if num_full:
                num_full -= 1
                raise OSError(errno.ENOSPC, "no space left")
            append(file, lines)

        async def noted(seconds: float) -> None:
            if seconds > 1.0:
                waits.append(seconds)
                seconds = 0.0
            await sleep(seconds)

        monkeypatch.setattr(LineFile, "append", full_at_first)
        monkeypatch.setattr(asyncio, "sleep", noted)
        service = service_of(None, Route())
        batch = await begun(service, [line(index) for index in range(5)])
        await ended(batch)
        assert waits == [5.0, 5.0]
        answered = results(service, batch.output_file)
        assert sorted(one["custom_id"] for one in answered) == [f"c{i}" for i in range(5)]
        close(service)

    asyncio.run(run())


def test_a_line_that_is_too_long_costs_no_more_than_its_result() -> None:
    async def run() -> None:
        route = Route()
        limits = Limits(max_body_mb=0.02, max_media_mb=0.02)
        service = service_of(None, route, limits)
        long = line(1, body={"prompt": "x" * 100_000})
        large = line(2, body={"prompt": "y" * 18_000})  # is read in a thread
        batch = await begun(service, [line(0), long, large, line(3)])
        await ended(batch)
        [error] = results(service, batch.error_file)
        assert error["custom_id"] is None
        assert "this line has more than 30,000 bytes" in error["error"]["message"]
        assert batch.num_completed == 3
        assert sum(route.asked.values()) == 3
        close(service)

    asyncio.run(run())


def test_batches_share_the_lines_that_are_open() -> None:
    async def run() -> None:
        route = Route()
        route.gate.clear()
        service = service_of(None, route)
        texts = [line(index) for index in range(WINDOW)]
        batches = [await begun(service, texts) for _ in range(4)]
        await until(lambda: len(service._runners) == len(batches))
        assert service._window() == WINDOW // 4
        await until(lambda: sum(route.asked.values()) >= WINDOW)
        # The first ones may have begun before the last was there.
        assert sum(route.asked.values()) <= WINDOW + WINDOW // 2 + WINDOW // 3 + WINDOW // 4
        route.gate.set()
        for batch in batches:
            await ended(batch)
            assert batch.num_completed == WINDOW
        close(service)

    asyncio.run(run())


def test_a_folder_that_is_moved_away_is_not_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        service = service_of(tmp_path, Route())
        file = await service.files.store(BytesIO(line(0).encode()), "alice", "in", "batch")
        folder = tmp_path / "files"
        folder.rename(tmp_path / "away")
        with pytest.raises(FileNotStored):
            await service.files.store(BytesIO(b"x"), "alice", "in", "batch")
        with pytest.raises(BatchRefused, match="not on the disk"):
            service.files.content_of(file)
        (tmp_path / "away").rename(folder)
        assert service.files.content_of(file).read_bytes() == line(0).encode()
        close(service)

    asyncio.run(run())


def test_a_batch_that_ends_while_its_folder_is_away_has_its_results_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.batches.results.AWAY_S", 0.005)
    waits: list[str] = []
    monkeypatch.setattr("weft.batches.results.log.seldom", lambda event, **_: waits.append(event))

    async def run() -> None:
        route = Route()
        route.gate.clear()
        folder = tmp_path / "state"
        service = service_of(folder, route)
        batch = await begun(service, [line(0), line(1)])
        await until(lambda: sum(route.asked.values()) == 2)
        folder.rename(tmp_path / "away")
        route.gate.set()
        await until(lambda: "results_wait" in waits)
        assert batch.is_open
        (tmp_path / "away").rename(folder)
        await ended(batch)
        assert (batch.status, len(results(service, batch.output_file))) == ("completed", 2)
        close(service)

    asyncio.run(run())


def test_a_batch_that_cannot_go_on_keeps_what_was_answered(tmp_path: Path) -> None:
    async def run() -> None:
        route = Route()
        route.gate.clear()
        route.quick = {"p0", "p1"}
        service = service_of(tmp_path, route)
        batch = await begun(service, [line(0), line(1), line(2)])
        await until(lambda: batch.num_completed == 2)
        service.stop()
        await asyncio.gather(*service._tasks.values(), return_exceptions=True)
        close(service)
        service.files.path_of(batch.input_file).unlink()
        again = service_of(tmp_path, Route())
        [found] = again.batches.values()
        assert (found.status, found.failure) == ("failed", "its input file is not there any more")
        there = results(again, found.output_file)
        assert sorted(one["custom_id"] for one in there) == ["c0", "c1"]
        close(again)

    asyncio.run(run())


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.005)


def test_a_cancelled_batch_keeps_what_was_answered() -> None:
    async def run() -> None:
        route = Route()
        service = service_of(None, route)
        route.gate.clear()
        route.quick = {"p0", "p7", "p9"}
        batch = await begun(service, [line(index) for index in range(600)])
        while batch.num_completed < 3:
            await asyncio.sleep(0.001)
        service.cancel(batch)
        assert batch.status == "cancelling"
        await ended(batch)
        assert batch.status == "cancelled"
        there = [*results(service, batch.output_file), *results(service, batch.error_file)]
        assert sorted(one["custom_id"] for one in there) == sorted(f"c{i}" for i in range(600))
        assert batch.num_completed == 3
        assert batch.num_cancelled == 597
        close(service)

    asyncio.run(run())


def test_an_expired_batch_ends_with_a_result_for_each_line() -> None:
    async def run() -> None:
        route = Route()
        route.gate.clear()
        service = service_of(None, route)
        batch = await begun(service, [line(index) for index in range(5)], window_s=0.0)
        await ended(batch)
        assert batch.status == "expired"
        codes = {one["error"]["code"] for one in results(service, batch.error_file)}
        assert codes == {"batch_expired"}
        close(service)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(6))
def test_servers_that_stop_at_any_moment_answer_each_line_once(tmp_path: Path, seed: int) -> None:
    """The files of results are what counts: a line that is there is not asked again."""
    rng = random.Random(seed)
    num_lines = 400

    async def run_for(seconds: float, *, first: bool) -> bool:
        route = Route(rng)
        service = service_of(tmp_path, route)
        if first:
            await begun(service, [line(index) for index in range(num_lines)])
        service.go_on()
        [batch] = service.batches.values()
        try:
            async with asyncio.timeout(seconds):
                await ended(batch)
        except TimeoutError:
            pass
        service.stop()
        await asyncio.sleep(0)
        await asyncio.gather(*service._tasks.values(), return_exceptions=True)
        if batch.is_open:
            for what in ("output", "errors"):
                torn = service.files.path_of(f"{batch.id}-{what}")
                if torn.exists() and rng.random() < 0.7:  # as a kill leaves it
                    with torn.open("ab") as file:
                        file.write(b'{"id": "half a li')
        else:
            assert batch.status == "completed", batch.failure
            there = results(service, batch.output_file)
            assert Counter(one["custom_id"] for one in there) == Counter(
                f"c{index}" for index in range(num_lines)
            )
            assert batch.num_completed == num_lines
            assert batch.num_failed == 0
        close(service)
        return batch.is_open

    is_open = asyncio.run(run_for(0.02, first=True))
    num_runs = 1
    while is_open:
        is_open = asyncio.run(run_for(rng.choice([0.01, 0.03, 5.0]), first=False))
        num_runs += 1
        assert num_runs < 200


def test_a_kill_while_files_of_results_are_made_loses_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        route = Route()
        service = service_of(tmp_path, route)
        batch = await begun(service, [line(index) for index in range(9)])
        await ended(batch)
        # The files were made, and the record of the batch was not written.
        service._enter(batch, "in_progress")
        close(service)
        again = service_of(tmp_path, route)
        again.go_on()
        [batch] = again.batches.values()
        await ended(batch)
        assert batch.status == "completed"
        assert len(results(again, batch.output_file)) == 9
        assert set(route.asked.values()) == {1}
        close(again)

    asyncio.run(run())


def test_a_file_is_on_the_disk_before_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    state = StateStore(tmp_path)
    files = StoredFiles(Limits(), state, time.time)
    stored = asyncio.run(files.store(BytesIO(b"a line\n"), "alice", "a.jsonl", "batch"))
    state.close()
    assert flushed == [files.path_of(stored.id).stat().st_ino]


def test_files_and_batches_belong_to_their_key_and_have_limits() -> None:
    async def run() -> None:
        limits = Limits(max_files=3, max_open_batches=1, max_batch_lines=2)
        route = Route()
        route.gate.clear()
        service = service_of(None, route, limits)
        batch = await begun(service, [line(0)])
        assert service.batch_of(batch.id, "bob", OPENAI) is None
        assert service.files.file_of(batch.input_file, "bob") is None
        assert service.files.file_of(batch.input_file, "alice") is not None
        with pytest.raises(BatchRefused, match="1 open batches"):
            await begun(service, [line(1)])
        with pytest.raises(BatchRefused, match="3 lines; at most 2"):
            await begun(service, [line(index) for index in range(3)], owner="bob")
        with pytest.raises(BatchRefused, match="no lines"):
            await begun(service, ["", " "], owner="carol")
        service.files.require_room("alice")
        service.files.add(batch.input_file, "alice", "x", "batch")
        with pytest.raises(BatchRefused, match="reads this file"):
            service.delete_file(service.files.by_id[batch.input_file])
        route.gate.set()
        await ended(batch)
        close(service)

    asyncio.run(run())
