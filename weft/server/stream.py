"""A generation as an HTTP answer: one JSON body, or a stream of server-sent events.

This is the hot path, therefore bare ASGI: one `send` for all output of an engine step for a
request. If the scope contains the server's connection, every piece except the first and the last of
a stream is written to the connection directly where the output arrives, without waking a task. A
`Reply` writes the bytes; this module decides when to send them. It also watches the client: a
disconnect closes the generation at once, whether the answer is a stream or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from weft.client.generation import Delta, Generation
from weft.observe.survivable import is_survivable
from weft.server.errors import ApiError, error_json, error_response, failed, translated
from weft.text.turns import Workers

MAX_WARNINGS_LEN = 2_000  # bytes of the header
# Tokens and log probabilities up to which a full body is written on the event loop: a few ms.
INLINE_VALUES = 8_192
LONG_VALUES = 131_072  # from which writing is long work, which leaves a thread free for others
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect events
]


Failure = Callable[[Sequence[Delta]], ApiError | None]


class Wire(NamedTuple):
    """How an API writes a stream."""

    content_type: bytes
    error: Callable[[ApiError], bytes]  # writes the event of an error
    end: bytes  # the last bytes of every stream


def sse_error(error: ApiError) -> bytes:
    """An error as a server-sent event in OpenAI's form."""
    return b"data: " + error_json(error) + b"\n\n"


SSE = b"text/event-stream; charset=utf-8"
OPENAI_EVENTS = Wire(SSE, sse_error, b"data: [DONE]\n\n")


class Reply(Protocol):
    """The bytes of one answer. Every API has its own implementation."""

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        """The body, from one delta per completion, in order."""

    def events(self, delta: Delta) -> bytes:
        """The events for the new output of one completion."""

    def closing(self) -> bytes:
        """The events after the end of the last completion, before the end of the stream."""


class WriteFlow(Protocol):
    async def drain(self) -> None:
        """Wait until the client has read most of what was written, or is gone."""


class PieceWriter(Protocol):
    """The connection to the client (`server/http/protocol.py`). Pieces follow the head of the
    answer."""

    def write_piece(self, body: bytes) -> None: ...

    @property
    def takes_pieces(self) -> bool: ...

    @property
    def flow(self) -> WriteFlow: ...


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
        """`failure` finds the error of a full body, if the first error is not the right one."""
        self._generation = generation
        self._reply = reply
        self._wire = wire
        self._failure = failure or _failure
        self._broken: BaseException | None = None  # the exception of a failed write of a piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_close_when_gone(receive, self._generation))
        try:
            if self._generation.stream:
                await self._stream(scope, receive, send)
            else:
                await self._send_full_body(scope, receive, send)
            connection: PieceWriter | None = scope.get("weft.connection")
            if connection is not None and not connection.takes_pieces:
                await connection.flow.drain()
        finally:
            watcher.cancel()
            self._generation.close()

    # ---- one body

    async def _send_full_body(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        deltas: list[Delta] = []
        async for batch in self._generation:
            deltas += batch
        if self._generation.closed:
            return
        failure = self._failure(deltas)
        if failure is not None:
            await error_response(failure)(scope, receive, send)
            return
        if self._generation.before_answer is not None:
            await self._generation.before_answer()
        body = await self._written(deltas, scope.get("weft.writers"))
        if self._generation.before_end is not None:
            failure = await self._kept(self._generation.before_end)
            if failure is not None:
                await error_response(failure)(scope, receive, send)
                return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._warnings(),
        ]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": headers,
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def _written(self, deltas: Sequence[Delta], writers: Workers | None) -> bytes:
        """The body, written in a thread if there is much to write: many completions, or many values
        each."""
        num_values = 0
        for delta in deltas:
            # With log probabilities, each token has about as many values as the first one.
            num_of_token = 1
            if delta.logprobs:
                first = delta.logprobs[0]
                num_of_token = 2 + len(first.top_ids) + len(first.id_logprobs)
            num_values += len(delta.token_ids) * num_of_token
        if writers is None or num_values <= INLINE_VALUES:
            return self._reply.full_body(deltas)
        work = partial(self._reply.full_body, deltas)
        return await writers.run(work, is_long=num_values > LONG_VALUES)

    @staticmethod
    async def _kept(before_end: Callable[[], Awaitable[None]]) -> ApiError | None:
        """Wait until what the end says is true. Returns why it is not."""
        try:
            await before_end()
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            return translated(exc)
        return None

    # ---- a stream

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. The status is sent with the first events.

        So the status of a request that fails before its first events is that of its error. The loop
        runs once per engine step, with one `send` for all output of the step. After the first step,
        pieces are pushed until there is an end, an error, or a client that reads too slowly.
        """
        connection: PieceWriter | None = scope.get("weft.connection")
        started = False
        async for deltas in self._generation:
            failure = _failure(deltas)
            if not started:
                if failure is not None:
                    await error_response(failure)(scope, receive, send)
                    return
                await self._start(send)
                started = True
            body = b""
            before_answer = self._generation.before_answer
            if before_answer is not None and self._generation.has_ends:
                await before_answer()
            if failure is None:
                try:
                    body = b"".join(map(self._reply.events, deltas))
                except BaseException as exc:  # too late for a status: the stream has the error
                    if not is_survivable(exc):
                        raise
                    failure = translated(exc)
            before_end = self._generation.before_end
            if before_end is not None and self._generation.has_ends and failure is None:
                failure = await self._kept(before_end)
            if failure is not None:
                await self._finish(send, self._wire.error(failure))
                return
            if body:
                await send(
                    {
                        "type": "http.response.body",
                        "body": body,
                        "more_body": True,
                    }
                )
            if connection is not None:
                await self._generation.push_to(partial(self._push, connection))
                if self._broken is not None:
                    await self._finish(send, self._wire.error(translated(self._broken)))
                    return
        if not self._generation.closed:
            await self._finish(send, self._reply.closing())

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", self._wire.content_type),
            *_STREAM_HEADERS,
            *self._warnings(),
        ]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": headers,
            }
        )

    def _push(self, connection: PieceWriter) -> bool:
        """Write the new output.

        False if the task must write it: whenever a completion has ended, or the client does not
        read.
        """
        generation = self._generation
        if generation.has_ends or not connection.takes_pieces:
            return False
        try:
            body = b""
            for delta in generation.take():  # nearly always one delta
                events = self._reply.events(delta)
                body = body + events if body else events
            if body:
                connection.write_piece(body)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            self._broken = exc
            return False
        return True

    async def _finish(self, send: Send, last: bytes) -> None:
        body = last + self._wire.end
        await send(
            {
                "type": "http.response.body",
                "body": body,
                "more_body": False,
            }
        )

    def _warnings(self) -> list[tuple[bytes, bytes]]:
        """Headers with all warnings of the engine, which sends them before the first token."""
        texts: dict[tuple[str, str], None] = {}  # each warning once, in order
        for completion in self._generation.completions:
            texts.update(dict.fromkeys(completion.warnings))
        if not texts:
            return []
        by_header: dict[str, list[str]] = {}
        for header, text in texts:
            by_header.setdefault(header, []).append(text)
        headers = []
        for header, found in by_header.items():
            value = "; ".join(found).encode("ascii", "replace")[:MAX_WARNINGS_LEN]
            headers.append((f"x-weft-{header}".encode(), value))
        return headers


async def _close_when_gone(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


def _failure(deltas: Sequence[Delta]) -> ApiError | None:
    """The first failure among the completions that have ended."""
    for delta in deltas:
        if delta.end is not None and delta.end.status >= 400:
            return failed(delta.end.status, delta.end.message, delta.end.retry_after_s)
    return None
