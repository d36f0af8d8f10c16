"""Plays a trace to a running server over HTTP, and records what its client saw: the same record as
of a simulation of that trace.

The next message of a chat contains the answer that the server really gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import Future
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weft.bench.http import MAX_ERROR_BYTES, HttpClient, HttpError
from weft.sim.gaps import Gaps
from weft.sim.outcome import DONE, REFUSED
from weft.sim.run import BackgroundTokens, Record, RequestColumns
from weft.sim.trace import Arrival

TEMPERATURE = 1.0


class _TokenChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _TokenUsage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _TokenEvent(msgspec.Struct):
    choices: list[_TokenChoice] = []
    usage: _TokenUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_TokenEvent).decode


@dataclass
class PlayedRequest:
    """One request as its client saw it. Times are in seconds since the beginning of the run."""

    prompt: bytes = b""  # int32 each, as it was sent
    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)  # of each event with tokens
    event_lens: list[int] = field(default_factory=list)  # their tokens
    end_s: float = 0.0
    output: list[int] = field(default_factory=list)
    cached_len: int = 0
    error: str = ""

    @property
    def output_bytes(self) -> bytes:
        return np.array(self.output, dtype=np.int32).tobytes()


class PlayedTrace(NamedTuple):
    requests: Sequence[PlayedRequest]  # [N] as the arrivals
    record: Record

    @property
    def first_error(self) -> str:
        return next((request.error for request in self.requests if request.error), "")


async def play(
    server: HttpClient, arrivals: Sequence[Arrival], *, leaves: Awaitable[object] | None = None
) -> PlayedTrace:
    """Send all requests, each at its time, and wait for their ends. Prompts are token ids. The
    client leaves when `leaves` is over: requests that have not ended end so. Raises HttpError if
    the server cannot be reached at all."""
    first = await server.first_model()
    run = _TraceRun(server, first["id"], arrivals)
    requests = asyncio.gather(*(run.request(number) for number in range(len(arrivals))))
    if leaves is None:
        await requests
    else:
        await _until_left(requests, asyncio.ensure_future(leaves))
    record = _record(run.requests)
    return PlayedTrace(run.requests, record)


async def _until_left(requests: Future[Any], leaves: Future[Any]) -> None:
    """Wait for the requests, or cancel those that are open when `leaves` is done."""
    await asyncio.wait([requests, leaves], return_when=asyncio.FIRST_COMPLETED)
    leaves.cancel()
    if requests.done():
        requests.result()
        return
    requests.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await requests


class _TraceRun:
    def __init__(self, server: HttpClient, model: str, arrivals: Sequence[Arrival]) -> None:
        self.requests = [PlayedRequest() for _ in arrivals]
        self._server = server
        self._model = model
        self._arrivals = arrivals
        self._ended = [asyncio.Event() for _ in arrivals]
        self._began = time.perf_counter()

    async def request(self, number: int) -> None:
        arrival = self._arrivals[number]
        due = self._began + arrival.time_s
        if arrival.after >= 0:
            before = self._ended[arrival.after]
            await before.wait()
            due = time.perf_counter() + arrival.time_s
        left_s = due - time.perf_counter()
        await asyncio.sleep(max(left_s, 0.0))
        own = self.requests[number]
        own.prompt = self._prompt(arrival)
        ids = np.frombuffer(own.prompt, dtype=np.int32)
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": ids.tolist(),
                "max_tokens": arrival.max_new_tokens,
                "temperature": TEMPERATURE,
                "seed": number,
                "ignore_eos": arrival.ignore_eos,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        own.sent_s = time.perf_counter() - self._began
        try:
            await self._server.stream("/v1/completions", body, partial(self._take, own))
        except HttpError as exc:
            own.error = str(exc)
        own.end_s = time.perf_counter() - self._began
        self._ended[number].set()

    def _prompt(self, arrival: Arrival) -> bytes:
        """The prompt, with the real answer instead of the one in the trace."""
        assert isinstance(arrival.prompt, bytes), "prompts are token ids here"
        if arrival.after < 0:
            return arrival.prompt
        before = self._arrivals[arrival.after]
        assert isinstance(before.prompt, bytes)
        planned = before.prompt + before.output
        if not before.output or not arrival.prompt.startswith(planned):
            return arrival.prompt
        real = self.requests[arrival.after]
        so_far = real.prompt + real.output_bytes
        new = arrival.prompt[len(planned) :]
        return so_far + new

    def _take(self, own: PlayedRequest, data: bytes) -> None:
        """Record an event of the stream. Raises HttpError for an error event."""
        # The clock is read first, because decoding takes time.
        now = time.perf_counter() - self._began
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as exc:
            raise HttpError(f"an event of the stream cannot be read: {exc}") from exc
        if event.error is not None:
            text = data[:MAX_ERROR_BYTES].decode(errors="replace")
            raise HttpError(f"an event of the stream is an error: {text}")
        if event.usage is not None:
            details = event.usage.prompt_tokens_details or _PromptDetails()
            own.cached_len = details.cached_tokens
        for choice in event.choices:
            if choice.token_ids:
                own.event_s.append(now)
                own.event_lens.append(len(choice.token_ids))
                own.output += choice.token_ids


def _record(requests: Sequence[PlayedRequest]) -> Record:
    columns = RequestColumns()
    gaps = Gaps()
    for number, own in enumerate(requests):
        prompt_len = len(own.prompt) // 4
        columns.enter(number, own.sent_s, prompt_len, 0)
        columns.end_s[number] = own.end_s
        columns.output_len[number] = len(own.output)
        columns.cached_len[number] = own.cached_len
        columns.state[number] = DONE
        if own.error or not own.event_s:
            columns.state[number] = REFUSED
            continue
        columns.first_s[number] = own.event_s[0]
        # Each of several tokens in an event counts with the time since the one before, as in a
        # simulation.
        between_s = np.diff(own.event_s)
        gaps.add(np.repeat(between_s, own.event_lens[1:]))
    return columns.record(gaps, Gaps(), [""], BackgroundTokens())
