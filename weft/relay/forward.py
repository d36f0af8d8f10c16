"""Forwards requests to servers, and their answers to clients.

    client ─▶ body ─▶ a prefill server computes the prompt, and lends its KV (or not: then the next
                      server computes it)
                   ─▶ a decode server, or a worker ─▶ its answer, piece by piece ─▶ client

A request that did not reach a server goes to the next one. A request that may have reached a server
is not sent again, because its effect there is unknown: it ends with an error (but `connection.py`
repeats a question on a connection that was kept too long). When the client disconnects, the
connections to the servers are closed, which aborts the request there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from starlette.datastructures import Headers as ReadHeaders
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from weft.config.limits import Limits
from weft.json_types import JsonObject
from weft.observe import request_context
from weft.observe.log import EventLog
from weft.relay.body import SeenBody, for_decode, for_prefill, look_at, new_room, with_session
from weft.relay.connection import Headers, NotReached, RelayedAnswer, ServerGone
from weft.relay.metrics import RelayMetrics
from weft.relay.models import ANY_MODEL, LISTS, ONE_MODEL, ask_list, merged
from weft.relay.pool import RelayPool, RelayServer
from weft.server.body import json_bytes, read_body
from weft.server.errors import ApiError, error_event
from weft.server.http.form_texts import is_form, texts_of_form
from weft.server.several.asked import named_model

# Headers that belong to one connection, and are not forwarded.
HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"content-length"),
    }
)
# Headers of answers that the front writes itself: the middleware, and uvicorn.
OWN_HEADERS = frozenset({b"x-request-id", b"x-content-type-options", b"date"})
ELSEWHERE = b"x-weft-elsewhere"  # tells a server which other one had more of the prompt
MAX_PREFILL_BYTES = 1 << 20  # size of a prefill server's answer, which contains no tokens
SESSION_PATHS = ("/open_session", "/close_session")
# What these paths name is kept by the server that made it.
KEPT_PATHS = (
    *("/v1/responses", "/openai/v1/responses"),
    *("/v1/files", "/v1/batches", "/v1/messages/batches"),
)

log = EventLog("route")


class Destination(NamedTuple):
    """The properties of a request that decide about its server."""

    path: str
    seen: SeenBody
    bound_to: str  # requests with the same text here go to the same server; "": to any server
    model: str  # that it names; "" if it names none

    @property
    def needs_model(self) -> bool:
        """Whether the answer depends on the server's model."""
        named = self.model not in ANY_MODEL
        return named or (bool(self.seen.fields) and not self.bound_to)


class Forwarder:
    """The handler of all forwarded requests. Without `prefill`, `targets` also compute all
    prompts."""

    def __init__(
        self,
        prefill: RelayPool | None,
        targets: RelayPool,
        metrics: RelayMetrics,
        limits: Limits,
        prefill_wait_s: float,
    ) -> None:
        self._prefill = prefill
        self._targets = targets
        self._metrics = metrics
        self._limits = limits
        self._prefill_wait_s = prefill_wait_s
        self._ids = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        most = int(self._limits.max_body_mb * 1_000_000)
        body = await read_body(request, most, self._limits.body_timeout_s)
        work = asyncio.create_task(self._pass_on(scope, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        path = scope["path"]
        seen = look_at(body)
        body = seen.body
        bound_to = seen.session
        if path in SESSION_PATHS and seen.fields:
            body, bound_to = with_session(seen)
        elif path.startswith(KEPT_PATHS):
            bound_to = _sender(scope)
        where = Destination(path, seen, bound_to, _model_of(scope, seen, body))
        if path in LISTS and len(self._targets.up) > 1:
            await self._list_models(scope, send)
            return
        if self._prefill is not None and seen.may_be_handed(path):
            body = await self._with_prompt(scope, self._prefill, where, body)
        await self._answer_through(scope, where, body, send)

    # The prompt

    async def _with_prompt(
        self, scope: Scope, pool: RelayPool, where: Destination, body: bytes
    ) -> bytes:
        """Let a prefill server compute the prompt. Returns the body for the decode server, which is
        unchanged if no prefill server succeeded."""
        began_s = time.perf_counter()
        room = new_room()
        reason = "no_server"
        why = "none is ready"
        await pool.learn_models(_headers(scope))
        while True:
            id = next(self._ids)
            up = pool.models.ranks(where.model, pool.up)
            server = pool.choose(id, where.seen.routed, up)
            if server is None:
                break
            try:
                async with asyncio.timeout(self._prefill_wait_s):
                    status = await self._status_of(server, scope, for_prefill(where.seen, room))
            except NotReached as exc:
                server.set_state(f"{exc}")
                continue
            except TimeoutError:
                reason, why = "late", f"{server.address.url} took too long"
                break
            except (ServerGone, EOFError) as exc:
                reason, why = "lost", f"{server.address.url}: {exc}"
                break
            finally:
                pool.router.ended(id)
            if status != 200:
                reason, why = "refused", f"{server.address.url} answers {status}"
                break
            self._metrics.prefill_s.observe_one(time.perf_counter() - began_s)
            return for_decode(where.seen, room, server.address)
        self._metrics.alone(reason)
        log.seldom("computed_by_decode", reason=why)
        return body

    async def _status_of(self, server: RelayServer, scope: Scope, body: bytes) -> int:
        """Let a prefill server compute a prompt, and wait for the end. Returns the HTTP status.

        Raises `NotReached` and `ServerGone`.
        """
        answer = await server.ask(scope["method"], _target(scope), _headers(scope), body)
        try:
            await answer.read_all(MAX_PREFILL_BYTES)
        finally:
            answer.close()
        return answer.status

    # The answer

    async def _answer_through(
        self, scope: Scope, where: Destination, body: bytes, send: Send
    ) -> None:
        pool = self._targets
        has_looked = False
        while True:
            id = next(self._ids)
            up = await self._having_model(scope, where)
            server = pool.choose(id, where.seen.routed, up, where.bound_to)
            if server is None and not has_looked:
                has_looked = True
                await pool.look_again()
                continue
            if server is None:
                raise _no_server(pool)
            try:
                await self._answer_of(server, id, scope, where, body, send)
                return
            except NotReached as exc:
                server.set_state(f"{exc}")
            finally:
                pool.router.ended(id)

    async def _having_model(self, scope: Scope, where: Destination) -> list[int]:
        """The ready servers that may have the model of a request. Raises `ApiError` if there are
        ready ones, and none has it."""
        pool = self._targets
        up = pool.up
        if len(pool.servers) < 2 or not where.needs_model or not up:
            return up
        await pool.learn_models(_headers(scope))
        found = pool.models.ranks(where.model, pool.up)
        if not found and where.model not in ANY_MODEL:
            await pool.learn_models(_headers(scope), again=True)  # an adapter may have been loaded
            found = pool.models.ranks(where.model, pool.up)
        if not found and pool.up:
            raise pool.models.unseen(where.model, pool.out) or pool.models.none(where.model)
        return found

    async def _list_models(self, scope: Scope, send: Send) -> None:
        """Answer with the models of all servers. Raises `ApiError` if none lists any."""
        pool = self._targets
        headers = _headers(scope)
        target = _target(scope)
        asked = [ask_list(pool.servers[rank].lines, target, headers) for rank in pool.up]
        answers = await asyncio.gather(*asked)
        found = [answer for status, answer in answers if status == 200]
        if found:
            await _send_json(send, 200, merged(scope["path"], found))
            return
        status, answer = max(answers, key=lambda one: one[0])
        if not status:
            raise _no_server(pool)
        await _send_json(send, status, answer)

    async def _answer_of(
        self,
        server: RelayServer,
        id: int,
        scope: Scope,
        where: Destination,
        body: bytes,
        send: Send,
    ) -> None:
        """Send the request to a server, and its answer to the client.

        Raises `NotReached`, and `ApiError` if the server does not answer.
        """
        headers = _headers(scope)
        elsewhere = self._targets.elsewhere(id)
        if elsewhere:
            headers.append((ELSEWHERE, elsewhere.encode()))
        try:
            answer = await server.ask(scope["method"], _target(scope), headers, body)
        except NotReached:
            raise
        except ServerGone as exc:
            self._metrics.broken(self._targets.role)
            log.warning("no_answer", server=server.address.url, reason=exc)
            raise ApiError(502, f"the server that had the request has not answered: {exc}") from exc
        if elsewhere:
            self._metrics.sent_elsewhere()
        try:
            if answer.status == 404 and where.needs_model:
                unseen = self._targets.models.unseen(where.model, self._targets.out)
                if unseen is not None:
                    raise unseen
            await self._send_through(server, id, answer, scope, send)
        finally:
            answer.close()

    async def _send_through(
        self, server: RelayServer, id: int, answer: RelayedAnswer, scope: Scope, send: Send
    ) -> None:
        headers: Headers = []
        is_stream = False
        for name, value in answer.headers:
            if name == b"content-length" or name not in HOP_BY_HOP | OWN_HEADERS:
                headers.append((name, value))
            is_stream |= name == b"content-type" and value.startswith(b"text/event-stream")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            while piece := await answer.read():
                self._targets.router.began(id)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (ServerGone, EOFError) as exc:
            self._metrics.broken(self._targets.role)
            log.warning("answer_broken", server=server.address.url, reason=exc)
            await _break_off(scope, send, is_stream)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_json(send: Send, status: int, answer: JsonObject) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json_bytes(answer)})


async def _break_off(scope: Scope, send: Send, is_stream: bool) -> None:
    """End an incomplete answer: a stream with an error event, any other answer by aborting the
    client's connection."""
    if is_stream:
        error = ApiError(502, "the server has ended in the middle of the answer")
        event = error_event(scope["path"], error)
        await send({"type": "http.response.body", "body": event, "more_body": False})
        return
    connection = scope.get("weft.connection")
    if connection is not None:
        connection.transport.abort()


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


def _no_server(pool: RelayPool) -> ApiError:
    message = f"no {pool.role} server is ready"
    return ApiError(503, message, headers={"retry-after": "1"})


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _headers(scope: Scope) -> Headers:
    """The headers for the server. They keep the client's `host`, so that the server checks host
    names and origins as if the client had asked it directly."""
    headers: Headers = []
    for name, value in scope["headers"]:
        if name not in HOP_BY_HOP and name not in (b"x-request-id", ELSEWHERE):
            headers.append((name, value))
    client = scope.get("client")
    if client is not None:
        headers.append((b"x-forwarded-for", client[0].encode()))
    headers.append((b"via", b"1.1 weft"))
    headers.append((b"x-request-id", request_context.rid().encode()))
    return headers


def _model_of(scope: Scope, seen: SeenBody, body: bytes) -> str:
    """The model that a request names in its path, its body or its query; "" if it names none. The
    servers read it alike."""
    path = scope["path"]
    if path.startswith(ONE_MODEL):
        return str(path.removeprefix(ONE_MODEL))
    content_type = ReadHeaders(scope=scope).get("content-type", "")
    if is_form(content_type):
        found = texts_of_form(content_type, body).get("model")
    else:
        found = named_model(path, seen.text("model"), seen.text("name"))
    return str(found or Request(scope).query_params.get("model", ""))


def _sender(scope: Scope) -> str:
    """The sender of a request: its key, else its address."""
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key", b"api-key"):
            return str(value.decode("latin-1"))
    client = scope.get("client")
    return str(client[0]) if client else "local"
