"""`weft bench serving`: sends load to a running server with an OpenAI API (ours or another), and
measures its answers.

All times are those of a client, including network, tokenizer and detokenizer. Open loop: requests
arrive by a Poisson process, however slow the server is. Closed loop: each of a number of clients
sends its next request when its last one has ended. This module knows nothing of the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from weft.bench.http import MAX_ERROR_BYTES, HttpClient, HttpError
from weft.bench.results import percentiles, write_json
from weft.bench.workloads import WORKLOADS, RequestShape
from weft.config.numbers import counted
from weft.config.options import Settings, SettingsError, option
from weft.server.serve import run as run_loop
from weft.sim.table import number, table

# Token ids of prompts: every vocabulary has them, and none is a control token.
FIRST_ID = 100
LAST_ID = 1_000


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    url: str = option(
        "http://127.0.0.1:30000", "server with an OpenAI API", group="bench", everyday=True
    )
    model: str = option(
        "", "model to ask for; the server's first if not given", group="bench", everyday=True
    )
    requests: int = option(100, "number of requests", group="bench", everyday=True, low=1)
    rate: float = option(
        0.0,
        "requests a second (Poisson); 0: see --concurrency",
        group="bench",
        everyday=True,
        low=0,
    )
    concurrency: int = option(
        16, "open requests at most; 0: any number", group="bench", everyday=True, low=0
    )
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=1)
    shared_len: int = option(
        0,
        "tokens of the prompt that are the same in all requests",
        group="bench",
        everyday=True,
        low=0,
    )
    workload: str = option(
        "", "instead: one of w1 to w5, all requests at once", group="bench", everyday=True
    )
    seed: int = option(
        0, "of the prompts; prompts of different seeds share no prefix", group="bench"
    )
    api_key: str = option("", "key of the server", group="bench", everyday=True)
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


@dataclass(frozen=True, kw_only=True)
class ServingLoad:
    num_requests: int
    input_len: int
    output_len: int
    rate: float = 0.0  # requests per second; 0: as fast as `concurrency` allows
    concurrency: int = 0  # 0: unlimited
    shared_len: int = 0  # shared tokens at the beginning of every prompt
    model: str = ""  # "": the first model that the server lists
    seed: int = 0
    jobs: Sequence[RequestShape] = ()  # these, instead of `num_requests` of one length
    # Ask for the number of tokens with each event (continuous_usage_stats of vLLM and weft).
    counts_events: bool = False

    @property
    def shapes(self) -> Sequence[RequestShape]:
        if self.jobs:
            return self.jobs
        own_len = self.input_len - self.shared_len
        return [RequestShape(self.shared_len, own_len, self.output_len)] * self.num_requests


@dataclass
class ClientRequest:
    """One request as its client saw it. Times are in seconds of one clock."""

    sent_s: float
    event_s: list[float] = field(default_factory=list)  # of each event with text
    event_output: list[int] = field(default_factory=list)  # tokens until then, if the server tells
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
        """Seconds between its events. (One event carries one token, unless the server could not
        keep up.)"""
        pairs = zip(self.event_s, self.event_s[1:], strict=False)
        return [after - before for before, after in pairs]

    @property
    def token_itl_s(self) -> list[float]:
        """The same of each token: those of one event have its time, as an engine counts them. Needs
        `counts_events`."""
        found = []
        pairs = zip(self.event_output, self.event_output[1:], strict=False)
        for gap_s, (before, after) in zip(self.itl_s, pairs, strict=True):
            found += [gap_s] * (after - before)
        return found


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    calls: Sequence[ClientRequest]
    total_s: float

    @property
    def answered(self) -> list[ClientRequest]:
        return [call for call in self.calls if not call.error]

    @property
    def output_per_s(self) -> float:
        return sum(call.num_output for call in self.answered) / self.total_s

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.total_s


def bench_serving(settings: Settings) -> int:
    options = settings.make(ServingOptions)
    load = _load(options)
    try:
        outcome = run_loop(run(HttpClient(options.url, options.api_key), load))
    except HttpError as exc:
        raise SettingsError(str(exc)) from exc
    failed = [call for call in outcome.calls if call.error]
    if failed:
        first = failed[0].error
        requests = counted(len(outcome.calls), "request")
        print(f"{len(failed)} of {requests} failed, the first with: {first}")
    if not outcome.answered:
        return 1
    times = _percentiles(outcome)
    _print(outcome, times)
    named: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        named[name] = dict(zip(("p50", "p90", "p99"), values, strict=True))
    results = {
        "requests_per_s": outcome.requests_per_s,
        "output_per_s": outcome.output_per_s,
        "total_s": outcome.total_s,
        "num_failed": len(failed),
        "percentiles": named,
    }
    write_json(options.json, "serving", asdict(load), results)
    if failed:
        return 1
    return 0


def _load(options: ServingOptions) -> ServingLoad:
    """The load. Raises SettingsError for an unknown workload."""
    load = ServingLoad(
        num_requests=options.requests,
        input_len=options.input_len,
        output_len=options.output_len,
        rate=options.rate,
        concurrency=options.concurrency,
        shared_len=min(options.shared_len, options.input_len),
        model=options.model,
        seed=options.seed,
    )
    if not options.workload:
        return load
    if options.workload not in WORKLOADS:
        raise SettingsError(
            f"there is no workload {options.workload!r}; there are {', '.join(WORKLOADS)}"
        )
    requests = WORKLOADS[options.workload].requests
    return replace(load, jobs=requests, concurrency=0, rate=0.0)


def _percentiles(outcome: ServingRun) -> dict[str, list[float]]:
    """p50, p90 and p99 in milliseconds, by the name of the time."""
    answered = outcome.answered
    first_s: list[float] = []
    gaps_s: list[float] = []
    end_s: list[float] = []
    for call in answered:
        first_s.append(call.ttft_s)
        gaps_s += call.itl_s
        end_s.append(call.e2e_s)
    return {
        "TTFT ms": percentiles(first_s),
        "ITL ms": percentiles(gaps_s),
        "E2E ms": percentiles(end_s),
    }


def _print(outcome: ServingRun, times: dict[str, list[float]]) -> None:
    num_answered = len(outcome.answered)
    per_s = number(outcome.requests_per_s)
    print(f"{counted(num_answered, 'request')} in {outcome.total_s:.1f} s: {per_s} a second")
    print(f"{number(outcome.output_per_s)} output tokens a second")
    rows: list[list[str]] = []
    for name, values in times.items():
        rows.append([name, *map(number, values)])
    print(table(["", "p50", "p90", "p99"], rows))


# The load


async def run(server: HttpClient, load: ServingLoad) -> ServingRun:
    """Send a load and wait for its end. Raises HttpError if the server cannot be reached at all."""
    model = load.model
    if not model:
        first = await server.first_model()
        model = first["id"]
    rng = random.Random(load.seed)
    shapes = load.shapes
    head = _ids(rng, max(shape.shared_len for shape in shapes))
    bodies = []
    for shape in shapes:
        prompt = head[: shape.shared_len] + _ids(rng, shape.own_len)
        bodies.append(_body(model, prompt, shape.output_len, load.counts_events))
    gate = asyncio.Semaphore(load.concurrency or len(bodies))
    began = time.perf_counter()

    async def one(body: bytes) -> ClientRequest:
        async with gate:
            return await _call(server, body)

    paced = _paced(bodies, load.rate, rng)
    tasks = [asyncio.create_task(one(body)) async for body in paced]
    calls = await asyncio.gather(*tasks)
    return ServingRun(calls=calls, total_s=time.perf_counter() - began)


async def _paced(bodies: Sequence[bytes], rate: float, rng: random.Random) -> AsyncIterator[bytes]:
    """Yield each body at its time."""
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
    """The fields of an event that the benchmark reads, for any server."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


async def _call(server: HttpClient, body: bytes) -> ClientRequest:
    call = ClientRequest(time.perf_counter())
    try:
        await server.stream("/v1/completions", body, partial(_take, call))
        if not call.event_s:
            raise HttpError("the stream brought no token")
    except HttpError as exc:
        call.error = str(exc)
    call.end_s = time.perf_counter()
    return call


def _take(call: ClientRequest, data: bytes) -> None:
    """Record an event of the stream. Raises HttpError for an error event, or for invalid data."""
    # The clock is read first, because decoding takes time.
    now = time.perf_counter()
    if data == b"[DONE]":
        return
    try:
        event = _decode(data)
    except msgspec.DecodeError as exc:
        raise HttpError(f"an event of the stream cannot be read: {exc}") from exc
    if event.error is not None or event.choices is None:
        text = data[:MAX_ERROR_BYTES].decode(errors="replace")
        raise HttpError(f"an event of the stream is an error: {text}")
    if event.usage is not None:
        call.num_output = event.usage.completion_tokens
    if any(choice.text or choice.token_ids for choice in event.choices):
        call.event_s.append(now)
        call.event_output.append(call.num_output)


def _body(model: str, prompt: list[int], output_len: int, counts_events: bool) -> bytes:
    wanted = {"include_usage": True}
    if counts_events:
        wanted["continuous_usage_stats"] = True
    fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": wanted,
    }
    return msgspec.json.encode(fields)


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
