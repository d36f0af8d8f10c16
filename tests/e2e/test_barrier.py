"""Real servers with several engines whose inputs are blocked and opened beside running streams: all
change at one moment or at the same step, what was blocked comes in order of arrival, and an engine
that does not come keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.e2e.server import HANG_S, Server, wait_until
from tests.launch.tiny_model import write_uneven_experts
from tests.seeds import slow
from weft.cli.main import main
from weft.journal.file import JournalReader
from weft.journal.records import Ended, Launched, Read, Record, Submitted
from weft.messages.control import BlockInput, UnblockInput

STREAMS = [f"stream-{number}" for number in range(4)]
HELD = [f"held-{number}" for number in range(6)]


class Change(NamedTuple):
    """A change of the input, as the journal of one engine has it."""

    at_s: float  # in the message
    together: bool
    launched_s: float  # the last step before it
    changed_s: float  # where engines meet: when this one has met the others
    next_s: float  # the first step after the message


def decoded(path: Path) -> list[Any]:
    with JournalReader(path) as records:
        return [msgspec.msgpack.decode(record, type=Record) for record in records]


def changes(records: list[Any]) -> list[Change]:
    found: list[Change] = []
    now = launched_s = changed_s = 0.0
    message: BlockInput | UnblockInput | None = None
    for record in records:
        match record:
            case Read():
                now = record.now
            case Submitted(message=BlockInput() | UnblockInput() as order):
                message = order
            case Ended():
                changed_s = now
            case Launched() if message is not None:
                found.append(Change(message.at_s, message.together, launched_s, changed_s, now))
                message = None
                launched_s = now
            case Launched():
                launched_s = now
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(params=[False, True], ids=["replicas", "experts between engines"])
def keeps_step(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(folder: Path, tmp_path: Path, keeps_step: bool) -> Iterator[Server]:
    options = ["--dtype", "float32", "--device", "cpu", "--dp-size", "2"]
    options += ["--load-balance-method", "round_robin", "--journal", str(tmp_path / "journal")]
    if keeps_step:
        options.append("--enable-dp-attention")
    server = Server(str(folder), *options)
    yield server
    server.stop()


def ask(server: Server, rid: str, num_tokens: int) -> int:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    reply = server.post("/generate", input_ids=[1, 2, 3], rid=rid, sampling_params=sampling)
    return len(reply["output_ids"])


def rows(server: Server) -> dict[str, dict[str, Any]]:
    return {row["rid"]: row for row in server.get("/requests")["requests"]}


def input_state(server: Server) -> str:
    return str(server.get("/requests")["queue"]["input_state"])


def num_streaming(server: Server) -> int:
    return sum(row["output_tokens"] > 0 for row in rows(server).values())


def test_inputs_of_all_engines_are_blocked_and_opened_beside_running_streams(
    server: Server, tmp_path: Path, keeps_step: bool
) -> None:
    with ThreadPoolExecutor(len(STREAMS) + len(HELD)) as clients:
        server.post("/slow_down", forward_sleep_time=0.05)
        streams = [clients.submit(ask, server, rid, 100) for rid in STREAMS]
        assert wait_until(lambda: num_streaming(server) == len(STREAMS))
        # Replicas block in the order of the front, those that keep step after they have met.
        assert server.post("/block")["state"] == "blocked"
        assert wait_until(lambda: input_state(server) == "blocked")
        held = []
        for rid in HELD:
            held.append(clients.submit(ask, server, rid, 3))
            assert wait_until(lambda rid=rid: rid in rows(server))  # type: ignore[misc]
        queue = server.get("/requests")
        assert queue["queue"]["held_requests"] == len(HELD)
        assert {row["dp_rank"] for row in queue["requests"]} == {0, 1}
        whys = {row["why"] for rid, row in rows(server).items() if rid in HELD}
        assert whys == {"the input is blocked until POST /unblock"}
        opened = server.post("/unblock")["state"]
        server.post("/slow_down", forward_sleep_time=None)
        assert [stream.result() for stream in streams] == [100] * len(STREAMS)
        assert [one.result() for one in held] == [3] * len(HELD)
    assert opened == ("unblocked" if keeps_step else "barrier")
    assert wait_until(lambda: input_state(server) == "unblocked")
    admitted: dict[int, list[tuple[int, str]]] = {}
    for rid in HELD:
        (told,) = server.get(f"/requests/{rid}")["requests"]
        (step,) = [one["first_step"] for one in told["timeline"] if "admitted" in one["what"]]
        admitted.setdefault(told["dp_rank"], []).append((step, rid))
    assert all(steps == sorted(steps) for steps in admitted.values())  # in order of arrival
    assert server.stop() == 0

    journals = [tmp_path / f"journal.dp{rank}" for rank in range(2)]
    both = [decoded(path) for path in journals]
    for pair in zip(*map(changes, both), strict=True):
        assert {change.together for change in pair} == {keeps_step}
        assert len({change.at_s for change in pair}) == 1, "another moment"
        if keeps_step:
            # Whoever had changed waited for the other: nobody ran a step of its own meanwhile.
            assert max(one.launched_s for one in pair) < min(one.changed_s for one in pair)
            assert all(one.launched_s < one.changed_s < one.next_s for one in pair)
    for path in journals:
        assert main(["replay", str(path), "--check", "on"]) == 0


# Replicas with --all: an engine that others wait for is harder.
@pytest.mark.parametrize("keeps_step", [True, *slow([False])], indirect=True)
def test_an_engine_that_does_not_come_is_named_and_the_inputs_stay_alike(
    server: Server, tmp_path: Path, keeps_step: bool
) -> None:
    stopped = server.engines[1]
    stopped.suspend()
    try:
        failed = httpx.post(f"{server.url}/block", timeout=HANG_S)
    finally:
        stopped.resume()
    assert failed.status_code == 503
    assert "does not answer" in failed.text
    assert wait_until(lambda: httpx.get(f"{server.url}/requests").status_code == 200)
    assert wait_until(lambda: input_state(server) != "barrier")
    state = input_state(server)
    server.post("/unblock")
    assert ask(server, "after", 3) == 3
    assert server.stop() == 0
    if not keeps_step:
        assert state == "blocked"  # both had the message, for a moment that is over
        return
    # Both have come in time, or both have changed nothing.
    met = []
    for rank in range(2):
        records = decoded(tmp_path / f"journal.dp{rank}")
        met.append(next(record.ok for record in records if isinstance(record, Ended)))
    assert met == [state == "blocked"] * 2
