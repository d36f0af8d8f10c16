"""The application of a server with several models: gives each request to the routes of its model.

    request ─▶ its `model` is loaded ────────────────────────────▶ that model's own routes
            ─▶ concerns all models?  ─▶ routes.py
            ─▶ concerns none?        ─▶ the blank model's routes
            ─▶ its model, by `model` ─▶ wait until it is loaded ─▶ that model's own routes

A model's routes are those of a server with this model alone: no handler knows of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config.limits import Limits
from weft.observe.request_context import rename, spent
from weft.observe.survivable import is_survivable
from weft.server.app import ModelApp, RouteTable, grouped
from weft.server.body import INLINE_LEN, LARGE_LEN, EarlyBody, read_body
from weft.server.errors import ApiError, ClientGone, error_response
from weft.server.leaving import receiver, while_client_waits
from weft.server.several.asked import Asked, idle_time_s, plain_name, read_asked
from weft.server.several.pause import COMMENT_EVERY_S, PausedAnswer
from weft.server.several.roster import Roster
from weft.server.several.routes import ROUTES, RosterHandler, unloaded_answer

# What a model's own routes answer without an engine, and alike for all models.
OF_NO_MODEL = (
    *("/", "/version", "/api/version", "/openapi.json", "/docs", "/state"),
    # The models on this machine, whether they are served or not.
    *("/api/pull", "/api/copy"),
)
BELOW_NO_MODEL = (
    *("/page/", "/v1/responses/"),
    *("/v1/files", "/v1/batches", "/v1/messages/batches"),
)
# Below one of these, but for a model.
OF_A_MODEL = ("/v1/responses/input_tokens",)
WITH_BODY = ("POST", "PUT")
OLLAMA = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")


class AnsweredBy(NamedTuple):
    """The routes that answer a request, and what they are called with."""

    routes: ASGIApp
    receive: Receive
    send: Send
    used: str = ""  # the model, which is kept in memory until the answer has ended; "": none
    idle_s: float | None = None  # how long that model is kept afterwards; None: as ever


class ArrivedRequest(Protocol):
    """What has arrived of a request and has not been read."""

    body: bytes | bytearray


class ArrivalConnection(Protocol):
    """The connection of a request (`server/http/protocol.py`)."""

    answered: ArrivedRequest

    @property
    def is_receiving(self) -> bool:
        """Whether the end of the request has not arrived yet."""


class SeveralModels:
    """The routes of a server with several models, as `ModelApp.routes` are those of one.

    A request for a model that is loaded costs hardly more than on a server with this model alone:
    its body is looked at where it lies, and then it goes to the model's own routes.
    """

    def __init__(self, roster: Roster, limits: Limits) -> None:
        self._roster = roster
        self._limits = limits
        self._find = RouteTable(roster.blank.operations).find
        own: list[Route] = []
        for path, by_method in grouped(ROUTES).items():
            handlers = {method: one.handler for method, one in by_method.items()}
            own.append(Route(path, _OwnEndpoint(roster, handlers), methods=list(handlers)))
        self._router = Router(own, redirect_slashes=False, default=self._to_model)
        self._own_paths = frozenset(one.path for one in ROUTES)
        heads = (one.path.partition("{") for one in ROUTES)
        self._own_heads = tuple({head for head, brace, _ in heads if brace})
        # Paths whose requests are for the model that their body names.
        self._to_named = frozenset(
            one.path
            for one in roster.blank.operations
            if "{" not in one.path
            and (one.method, one.access) == ("POST", "user")
            and not (self._is_own(one.path) or _is_of_no_model(one.path))
        )
        self._largest = "max_body_mb"
        if limits.max_media_mb > limits.max_body_mb:
            self._largest = "max_media_mb"
        self._largest_len = int(getattr(limits, self._largest) * 1_000_000)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = scope["path"]
        if path in self._to_named and not scope["query_string"]:
            return self._to_loaded(scope, receive, send)
        if self._is_own(path):
            receiver.set(receive)
            return self._router(scope, receive, send)
        return self._to_model(scope, receive, send)

    def _is_own(self, path: str) -> bool:
        return path in self._own_paths or path.startswith(self._own_heads)

    async def _to_loaded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the model that its body names: at once, if that is loaded."""
        connection: ArrivalConnection | None = scope.get("weft.connection")
        body: bytes | bytearray | None = None
        if connection is not None and not connection.is_receiving:
            body = connection.answered.body
        if body is None:
            body, receive = await self._read(scope, receive)
        name = plain_name(body) if len(body) <= LARGE_LEN else None
        body = b""  # it may be large, and the answer long
        entered = None if name is None else self._roster.enter(name)
        if entered is None:
            await self._to_model(scope, receive, send)
            return
        name, served = entered
        try:
            await served.routes(scope, receive, send)
        finally:
            self._roster.done(name)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
        """The body, and a `receive` from which whoever answers gets it again."""
        request = Request(scope, receive)
        timeout_s = self._limits.body_timeout_s
        body = await read_body(request, self._largest_len, timeout_s, self._largest)
        early = EarlyBody(body, receive)
        scope["weft.body"] = early
        return body, early.receive

    async def _to_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        receiver.set(receive)
        chosen = await self._choose(scope, receive, send)
        if chosen is None:
            return
        try:
            await chosen.routes(scope, chosen.receive, chosen.send)
        finally:
            if chosen.used:
                self._roster.done(chosen.used)
            if chosen.idle_s is not None:
                self._roster.keep(chosen.used, chosen.idle_s)

    async def _choose(self, scope: Scope, receive: Receive, send: Send) -> AnsweredBy | None:
        """Who answers, as soon as it is loaded. None: the request has been answered."""
        blank = self._roster.blank.routes
        path = scope["path"]
        route, access = self._find(path)
        if route == "other" or _is_of_no_model(path):
            return AnsweredBy(blank, receive, send)
        asked = Asked()
        has_body = scope["method"] in WITH_BODY
        if has_body:
            body, receive = await self._read(scope, receive)
            read = partial(read_asked, path, body, Headers(scope=scope).get("content-type", ""))
            if len(body) <= INLINE_LEN:
                asked = read()
            else:
                asked = await self._roster.blank.context.readers.run(read)
            asked.is_readable |= not body and access == "admin"  # most of these need no body
            if asked.rid or asked.request_id:
                rename(str(asked.rid or asked.request_id)[: self._limits.max_rid_len])
        if not asked.model and scope["query_string"]:
            asked.model = Request(scope).query_params.get("model")
        if not asked.is_readable:
            return AnsweredBy(blank, receive, send)
        name = self._roster.find(asked.model or "")
        if access == "user" and has_body:
            return await self._loaded(name, asked, scope, receive, send)
        served = self._roster.served(name)
        if served is None:
            message = f"the model {name!r} is not loaded; POST /models/load loads it"
            raise ApiError(409, message, param="model", code="model_not_loaded")
        return AnsweredBy(served.routes, receive, send)

    async def _loaded(
        self, name: str, asked: Asked, scope: Scope, receive: Receive, send: Send
    ) -> AnsweredBy | None:
        """The model, as soon as it is loaded. None: the request has been answered."""
        idle_s: float | None = None
        if scope["path"] in OLLAMA and asked.keep_alive is not None:
            idle_s = idle_time_s(asked.keep_alive)
            if idle_s == 0.0 and not asked.has_prompt:
                await self._roster.unload(name)
                await unloaded_answer(scope["path"], asked)(scope, receive, send)
                return None
        entered = self._roster.enter(name)
        served = None if entered is None else entered[1]
        if served is None:
            asking_s = time.perf_counter()
            try:
                served, send = await self._wait(name, asked, scope, send)
            finally:
                spent("load", asking_s)
        if served is None:
            return None
        return AnsweredBy(served.routes, receive, send, name, idle_s)

    async def _wait(
        self, name: str, asked: Asked, scope: Scope, send: Send
    ) -> tuple[ModelApp | None, Send]:
        """The loaded model, and where its answer goes. None: the request has ended."""
        rid = asked.rid or asked.request_id or scope["weft.rid"]
        work = self._roster.use(name, str(rid)[: self._limits.max_rid_len])
        try:
            if asked.stream is True and not scope["path"].startswith("/api/"):
                paused = PausedAnswer(scope, send)
                return await self._use_with_comments(name, work, paused), paused
            return await while_client_waits(work), send
        except ClientGone as exc:
            scope["weft.error"] = str(exc)
            return None, send

    async def _use_with_comments(
        self, name: str, work: Awaitable[ModelApp], paused: PausedAnswer
    ) -> ModelApp | None:
        """The loaded model; None if the stream has ended with an error."""

        async def commented() -> ModelApp:
            using = asyncio.ensure_future(work)
            try:
                while not (await asyncio.wait({using}, timeout=COMMENT_EVERY_S))[0]:
                    await paused.comment(name, self._roster.delay(name))
                return using.result()
            except asyncio.CancelledError:
                using.cancel()
                if using.done() and not using.cancelled() and using.exception() is None:
                    self._roster.done(name)  # its model came as the client left
                raise

        try:
            return await while_client_waits(commented())
        except ApiError as exc:
            if await paused.fail(exc):
                return None
            raise


def _is_of_no_model(path: str) -> bool:
    if path in OF_A_MODEL:
        return False
    return path in OF_NO_MODEL or path.startswith(BELOW_NO_MODEL)


class _OwnEndpoint:
    """Runs the handler of a method, for what concerns all models, and answers with an error if it
    raises."""

    def __init__(self, roster: Roster, handlers: Mapping[str, RosterHandler]) -> None:
        self._roster = roster
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp
        try:
            handler = self._handlers[scope["method"]]
            answer = await handler(self._roster, Request(scope, receive))
        except ClientGone as exc:
            scope["weft.error"] = str(exc)
            return
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            answer = error_response(exc)
        await answer(scope, receive, send)
