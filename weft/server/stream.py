"""A generation as an HTTP answer: one JSON body, or server-sent events while it grows.

Bare ASGI, because this is the hot path: one `send` for everything that an engine step brought to a request. Where the
server gives its `PieceWriter` with the request, what is neither the beginning nor the end of a stream is written to that
from where it comes, and no task is woken for it. What the bytes say is the business of a `Reply`; this module knows
when to send them, and that a client can go away: its disconnect closes the generation at once, whether the answer is a
stream or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from weft.client.generation import Delta, Generation
from weft.observe.survivable import is_survivable
from weft.server.errors import ApiError, error_json, error_response, failed, translated
from weft.text.turns import Workers

MAX_WARNINGS_LEN = 2_000  # bytes of the header
INLINE_VALUES = 8_192  # tokens and log probabilities of a whole answer that is written on the event loop: a few ms
LONG_VALUES = 131_072  # of one that leaves a thread to others
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect events
]


Failure = Callable[[Sequence[Delta]], ApiError | None]


class Wire(NamedTuple):
    """How an API writes a stream."""

    content_type: bytes
    error: Callable[[ApiError], bytes]  # the event that tells of an error
    end: bytes  # what stands behind everything


OPENAI_EVENTS = Wire(
    b"text/event-stream; charset=utf-8",
    lambda error: b"data: " + error_json(error) + b"\n\n",
    b"data: [DONE]\n\n",
)


class Reply(Protocol):
    """The bytes of one answer. Written once per API."""

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        """The body, from one delta for each completion, in order."""

    def events(self, delta: Delta) -> bytes:
        """The events for what is new of one completion."""

    def closing(self) -> bytes:
        """The events after the last completion has ended, before the end of the stream."""


class PieceWriter(Protocol):
    """The way to the client (`server/http/protocol.py`). Pieces follow the head of the answer."""

    def write_piece(self, body: bytes) -> None: ...

    @property
    def takes_pieces(self) -> bool: ...


class Answer:
    """The ASGI application that answers one request with its generation."""

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        wire: Wire = OPENAI_EVENTS,
        *,
        failure: Failure | None = None,
    ) -> None:
        """`failure` finds what an answer that is no stream fails with, if the first error is not enough."""
        self._generation = generation
        self._reply = reply
        self._wire = wire
        self._failure = failure or _failure
        self._broken: BaseException | None = None  # what writing a piece has raised

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            watcher = asyncio.create_task(_close_when_gone(receive, self._generation))
            try:
                if self._generation.stream:
                    await self._stream(scope, receive, send)
                else:
                    await self._whole(scope, receive, send)
            finally:
                watcher.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = [delta async for batch in self._generation for delta in batch]
        if self._generation.closed:
            return
        failure = self._failure(deltas)
        if failure is not None:
            await error_response(failure)(scope, receive, send)
            return
        body = await self._written(deltas, scope.get("weft.writers"))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += self._warnings()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _written(self, deltas: Sequence[Delta], writers: Workers | None) -> bytes:
        """The body, made beside the event loop if there is much to write: many completions, or many values of each."""
        num_values = sum(map(_num_values, deltas))
        if writers is None or num_values <= INLINE_VALUES:
            return self._reply.full_body(deltas)
        return await writers.run(
            lambda: self._reply.full_body(deltas), is_long=num_values > LONG_VALUES
        )

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status is sent with the first events: a request that fails before has its error as the status.

        Once for each step of the engine, and one `send` for all that it brought; or, behind the first, pieces that are
        pushed until there is an end, an error, or a client that does not read as fast.
        """
        connection: PieceWriter | None = scope.get("weft.connection")
        started = False
        async for deltas in self._generation:
            failure = _failure(deltas)
            if not started:
                if failure is not None:
                    await error_response(failure)(scope, receive, send)
                    return
                headers = [
                    (b"content-type", self._wire.content_type),
                    *_STREAM_HEADERS,
                    *self._warnings(),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                started = True
            body = b""
            if failure is None:
                try:
                    body = b"".join(map(self._reply.events, deltas))
                except BaseException as exc:  # too late for a status: the stream says it
                    if not is_survivable(exc):
                        raise
                    failure = translated(exc)
            if failure is not None:
                await self._finish(send, self._wire.error(failure))
                return
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if connection is not None:
                await self._generation.push_to(partial(self._push, connection))
                if self._broken is not None:
                    await self._finish(send, self._wire.error(translated(self._broken)))
                    return
        if not self._generation.closed:
            await self._finish(send, self._reply.closing())

    def _push(self, connection: PieceWriter) -> bool:
        """Write what is new. False, if that is the task's business: always, once a completion has ended."""
        if self._generation.has_ends or not connection.takes_pieces:
            return False
        try:
            body = b"".join(map(self._reply.events, self._generation.take()))
            if body:
                connection.write_piece(body)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            self._broken = exc
            return False
        return True

    def _warnings(self) -> list[tuple[bytes, bytes]]:
        """A header with everything that the engine warns of. It has told before the first token."""
        texts = dict.fromkeys(text for one in self._generation.completions for text in one.warnings)
        value = "; ".join(texts).encode("ascii", "replace")[:MAX_WARNINGS_LEN]
        return [(b"x-weft-warnings", value)] if value else []

    async def _finish(self, send: Send, last: bytes) -> None:
        await send(
            {"type": "http.response.body", "body": last + self._wire.end, "more_body": False}
        )


def _num_values(delta: Delta) -> int:
    """Tokens, and log probabilities if they are told: about as many of each token."""
    first = delta.logprobs[0] if delta.logprobs else None
    return len(delta.token_ids) * (
        1 if first is None else 2 + len(first.top_ids) + len(first.id_logprobs)
    )


async def _close_when_gone(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


def _failure(deltas: Sequence[Delta]) -> ApiError | None:
    """The first failure among completions that have ended."""
    for delta in deltas:
        if delta.end is not None and delta.end.failed:
            return failed(delta.end.status, delta.end.message, delta.end.retry_after_s)
    return None
