"""The load generator against a server of forty lines: any OpenAI server, and every way in which one
can break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from weft.bench.http import EventParser, HttpClient, HttpError
from weft.bench.serving import ClientRequest, ServingLoad, ServingRun, run

LOAD = ServingLoad(num_requests=6, input_len=5, output_len=4)


class Fake:
    """Answers every completion with its tokens, an event each."""

    def __init__(
        self,
        status: int = 200,
        breaks_off: bool = False,
        is_chunked: bool = True,
        models: bytes = b'{"data": [{"id": "some-model"}]}',
        last: bytes = b"",
        waits_for: int = 0,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0
        self._status = status
        self._breaks_off = breaks_off
        self._is_chunked = is_chunked
        self._models = models
        self._last = last  # an event behind those of the tokens
        self._waits_for = waits_for  # requests that must have come before the first is answered

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(lines["content-length"]))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        coding = "Transfer-Encoding: chunked\r\n" if self._is_chunked else ""
        writer.write(f"HTTP/1.1 {self._status} Whatever\r\n{coding}\r\n".encode())
        async for piece in self._answer(head, body):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._is_chunked else piece)
        if not self._breaks_off and self._is_chunked:
            writer.write(b"0\r\n\r\n")
        self.num_open -= 1
        writer.close()

    async def _answer(self, head: str, body: bytes) -> AsyncIterator[bytes]:
        if head.startswith("GET /v1/models"):
            yield self._models
            return
        self.bodies.append(json.loads(body))
        if self._status != 200:
            yield b'{"error": {"message": "overloaded", "more": "%b"}}' % (b"x" * 300)
            return
        while len(self.bodies) < self._waits_for:
            await asyncio.sleep(0.002)
        for _ in range(self.bodies[-1]["max_tokens"]):
            await asyncio.sleep(0.002)
            event = json.dumps({"choices": [{"text": "x"}]}).encode()
            yield b"data: " + event[:7]  # an event in two pieces
            yield event[7:] + b"\n\n"
        if self._last:
            yield b"data: " + self._last + b"\n\n"
        if not self._breaks_off:
            yield b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def served(fake: Fake) -> AsyncIterator[HttpClient]:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        yield HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", api_key="k")


def measure(fake: Fake, load: ServingLoad) -> ServingRun:
    async def go() -> ServingRun:
        async with served(fake) as server:
            return await run(server, load)

    return asyncio.run(go())


@pytest.mark.parametrize("is_chunked", [True, False])
def test_times_of_every_token_are_taken(is_chunked: bool) -> None:
    outcome = measure(Fake(is_chunked=is_chunked), LOAD)
    assert len(outcome.answered) == 6
    for call in outcome.answered:
        assert call.num_output == 4
        assert len(call.itl_s) == 3
        assert 0 < call.ttft_s < call.e2e_s
    assert outcome.output_per_s == pytest.approx(24 / outcome.total_s)


def test_the_tokens_of_one_event_have_its_time() -> None:
    call = ClientRequest(0.0, event_s=[1.0, 1.5, 1.75], event_output=[1, 4, 5])
    assert call.itl_s == [0.5, 0.25]
    assert call.token_itl_s == [0.5, 0.5, 0.5, 0.25]


def test_a_server_is_asked_for_the_tokens_of_each_event_only_if_wanted() -> None:
    for wanted in (False, True):
        fake = Fake()
        measure(fake, replace(LOAD, counts_events=wanted))
        for body in fake.bodies:
            assert body["stream_options"].get("continuous_usage_stats", False) == wanted


def test_prompts_differ_behind_what_is_shared() -> None:
    fake = Fake()
    measure(fake, replace(LOAD, input_len=20, shared_len=8))
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({prompt[:8] for prompt in prompts}) == 1
    assert len(set(prompts)) == 6
    assert {body["model"] for body in fake.bodies} == {"some-model"}


def test_no_more_requests_are_open_than_asked_for() -> None:
    fake = Fake()
    measure(fake, replace(LOAD, concurrency=2))
    assert fake.most_open == 2


def test_requests_come_at_the_rate_however_slow_the_answers_are() -> None:
    sent = [
        call.sent_s
        for call in measure(Fake(waits_for=LOAD.num_requests), replace(LOAD, rate=100.0)).calls
    ]
    assert sorted(sent) == sent
    assert sent[-1] - sent[0] > 0.005


@pytest.mark.parametrize(
    "fake", [Fake(status=503), Fake(breaks_off=True)], ids=["refused", "broken off"]
)
def test_failed_requests_are_counted_and_do_not_stop_the_others(fake: Fake) -> None:
    load = replace(LOAD, model="m")
    if fake._status == 503:
        outcome = measure(fake, load)
        assert not outcome.answered
        assert outcome.calls[0].error == "/v1/completions answers 503: overloaded"
    else:
        outcome = measure(fake, load)
        assert all(call.error for call in outcome.calls)


@pytest.mark.parametrize(
    "last", [b'{"error": {"message": "out of memory"}}', b'{"choices": [{', b'{"choices": 1}']
)
def test_an_event_that_is_an_error_or_none_at_all_fails_its_request(last: bytes) -> None:
    outcome = measure(Fake(last=last), replace(LOAD, num_requests=1))
    assert "an event of the stream" in outcome.calls[0].error


def test_unreachable_server_is_an_error() -> None:
    told = r"cannot reach http://127.0.0.1:9: (?!\[Errno)"
    with pytest.raises(HttpError, match=told):
        asyncio.run(run(HttpClient("http://127.0.0.1:9"), LOAD))


@pytest.mark.parametrize("models", [b"<html>", b'{"data": []}', b'["m"]'])
def test_a_server_of_another_kind_is_an_error(models: bytes) -> None:
    with pytest.raises(HttpError, match=r"answers no JSON|lists no model"):
        measure(Fake(models=models), LOAD)


def test_events_are_found_across_pieces() -> None:
    found: list[bytes] = []
    events = EventParser(found.append)
    for piece in (b"da", b"ta: one\n\n: comment\ndata:two\n", b"\ndata: three\n\n"):
        events.push(piece)
    assert found == [b"one", b"two", b"three"]
