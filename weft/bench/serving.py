"""Load for a running server with an OpenAI API (ours or another's), and how it answers. All times are as a client sees
them, with network, tokenizer and detokenizer.

Open loop: requests come by a Poisson process, however slow the server is. Closed loop: so many clients, each of which
sends the next request when its last one has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from weft.bench.http import MAX_ERROR_BYTES, HttpError, Server
from weft.bench.workloads import Job

FIRST_ID, LAST_ID = (
    100,
    1_000,
)  # token ids of prompts: every vocabulary has them, and they are no control tokens


@dataclass(frozen=True, kw_only=True)
class Load:
    num_requests: int
    input_len: int
    output_len: int
    rate: float = 0.0  # requests a second; 0: as fast as `concurrency` lets
    concurrency: int = 0  # 0: without bound
    shared_len: int = 0  # tokens with which every prompt begins
    model: str = ""  # "": the first that the server names
    seed: int = 0
    jobs: Sequence[Job] = ()  # these instead of `num_requests` of one length


@dataclass
class Call:
    """One request as its client saw it. Seconds of one clock."""

    sent_s: float
    event_s: list[float] = field(default_factory=list)  # of each event that brought text
    end_s: float = 0.0
    num_output: int = 0  # tokens
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Seconds between its events. (One event brings one token, unless the server could not keep up.)"""
        return [
            after - before for before, after in zip(self.event_s, self.event_s[1:], strict=False)
        ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    calls: Sequence[Call]
    total_s: float

    @property
    def answered(self) -> list[Call]:
        return [call for call in self.calls if not call.error]

    @property
    def output_per_s(self) -> float:
        return sum(call.num_output for call in self.answered) / self.total_s

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.total_s


async def run(server: Server, load: Load) -> Outcome:
    """Send a load and wait for its end. Raises HttpError if the server cannot be reached at all."""
    model = load.model or (await server.get_json("/v1/models"))["data"][0]["id"]
    rng = random.Random(load.seed)
    own_len = load.input_len - load.shared_len
    jobs = load.jobs or [Job(load.shared_len, own_len, load.output_len)] * load.num_requests
    head = _ids(rng, max(job.shared_len for job in jobs))
    bodies = [
        _body(model, head[: job.shared_len] + _ids(rng, job.own_len), job.output_len)
        for job in jobs
    ]
    gate = asyncio.Semaphore(load.concurrency or len(jobs))
    began = time.perf_counter()

    async def one(body: bytes) -> Call:
        async with gate:
            return await _call(server, body)

    tasks = [asyncio.create_task(one(body)) async for body in _paced(bodies, load.rate, rng)]
    calls = await asyncio.gather(*tasks)
    return Outcome(calls=calls, total_s=time.perf_counter() - began)


async def _paced(bodies: Sequence[bytes], rate: float, rng: random.Random) -> AsyncIterator[bytes]:
    """Each body at its time."""
    due = time.perf_counter()
    for body in bodies:
        if rate:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += rng.expovariate(rate)
        yield body


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is looked at in an event of a stream, of whichever server."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


async def _call(server: Server, body: bytes) -> Call:
    call = Call(time.perf_counter())
    try:
        await server.stream("/v1/completions", body, partial(_take, call))
        if not call.event_s:
            raise HttpError("the stream brought no token")
    except HttpError as exc:
        call.error = str(exc)
    call.end_s = time.perf_counter()
    return call


def _take(call: Call, data: bytes) -> None:
    """Note what an event of the stream brings. Raises HttpError if that is an error, or no event at all."""
    now = time.perf_counter()
    if data == b"[DONE]":
        return
    try:
        event = _decode(data)
    except msgspec.DecodeError as exc:
        raise HttpError(f"an event of the stream cannot be read: {exc}") from exc
    if event.error is not None or event.choices is None:
        raise HttpError(
            f"an event of the stream tells of an error: {data[:MAX_ERROR_BYTES].decode(errors='replace')}"
        )
    if event.usage is not None:
        call.num_output = event.usage.completion_tokens
    for choice in event.choices:
        if choice.text or choice.token_ids:
            call.event_s.append(now)
            return


def _body(model: str, prompt: list[int], output_len: int) -> bytes:
    fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(fields)


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
