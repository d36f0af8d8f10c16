"""Servers that answer what a test wants, and the front before them, each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import uvloop
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.server.fake import HANG_S, eventually
from weft.config.relay import RelayConfig, relay_servers
from weft.config.server import ServerConfig
from weft.launch.listen import listen
from weft.relay.app import Relay
from weft.server.serve import make_server

PROMPT = "a prompt that is so long that there are some whole pages of KV of it, to be handed over"


class ScriptedServer:
    """Answers all requests alike: `status`, then the `pieces` of the body. It waits for `go` before
    the last of them; None breaks the connection off."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.raw: list[bytes] = []
        self.heads: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.asked_as: set[str] = set()  # the names by which it was asked whether it is ready
        self.is_ready = True
        self.models: list[str] | None = None  # what it lists; None: it has no such list
        self.key = ""  # without it, the list is refused
        self.is_silent = False  # it takes questions whether it is ready, and never answers
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []  # beside that of the kind
        self.kind = "application/json"
        self.pieces: list[bytes | None] = [b"{}"]
        self.go = threading.Event()
        self.go.set()
        self.num_left = 0  # clients that have left before the end
        self.wire = b""  # these bytes answer every request, whatever they are

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.wire:
            scope["weft.connection"].transport.write(self.wire)
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if scope["path"] == "/ready":
            while self.is_silent:
                await asyncio.sleep(0.005)
            self.asked_as.add(dict(scope["headers"])[b"host"].decode())
            await JSONResponse({}, 200 if self.is_ready else 503)(scope, receive, send)
            return
        if scope["path"] == "/v1/models":
            await self._list(scope)(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        head = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.heads.append(head)
        self.targets.append(scope["path"] + "?" + scope["query_string"].decode())
        self.raw.append(body)
        is_form = head.get("content-type", "").startswith("multipart/")
        self.bodies.append(msgspec.json.decode(body) if body and not is_form else None)
        await self._answer(scope, receive, send)

    def _list(self, scope: Scope) -> JSONResponse:
        if self.key and (b"authorization", f"Bearer {self.key}".encode()) not in scope["headers"]:
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        if self.models is None:
            return JSONResponse({}, 404)
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.pieces[0] is None:
            scope["weft.connection"].transport.abort()
            return
        headers = [(b"content-type", self.kind.encode()), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        gone = asyncio.ensure_future(receive())
        for piece in self.pieces:
            if piece is self.pieces[-1]:
                while not self.go.is_set() and not gone.done():
                    await asyncio.sleep(0.005)
            if piece is None:
                scope["weft.connection"].transport.abort()
                return
            if gone.done():
                self.num_left += 1
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})


class Serving:
    """An application on a port."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self.app = app
        self._listener: socket.socket = listen("127.0.0.1", port)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = make_server(app, ServerConfig(drain_s=1.0))
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._http.serve(sockets=[self._listener]))

    def stop(self) -> None:
        self._http.should_exit = True
        self._http.force_exit = True
        self._thread.join(HANG_S)
        self.loop.close()
        self._listener.close()


class Stage:
    """A front, and what is behind it."""

    def __init__(self, relay: Relay, serving: Serving) -> None:
        self.relay = relay
        self.url = serving.url
        self._serving = serving

    def is_up(self, role: str, num: int) -> bool:
        """Whether so many servers of a kind get requests, soon."""
        (pool,) = [pool for pool in self.relay.pools if pool.role == role]
        return eventually(lambda: pool.num_up == num)


@contextlib.contextmanager
def staged(
    *,
    worker: Sequence[Serving] = (),
    prefill: Sequence[Serving] = (),
    decode: Sequence[Serving] = (),
    watch_s: float = 0.02,
    **options: Any,
) -> Iterator[Stage]:
    """A front before these servers, all of which are up, and which it asks again every
    `watch_s`."""
    config = RelayConfig(
        worker=" ".join(one.url for one in worker),
        prefill=" ".join(f"{one.url} 7" for one in prefill),
        decode=" ".join(one.url for one in decode),
        **options,
    )
    relay = Relay(config, relay_servers(config))
    serving = Serving(relay.app)
    watching = asyncio.run_coroutine_threadsafe(relay.watch(watch_s), serving.loop)
    stage = Stage(relay, serving)
    for pool in relay.pools:
        assert stage.is_up(pool.role, len(pool.servers))
    try:
        yield stage
    finally:
        watching.cancel()
        serving.loop.call_soon_threadsafe(relay.close)
        serving.stop()


@contextlib.contextmanager
def serving(*apps: ASGIApp) -> Iterator[list[Serving]]:
    started = [Serving(app) for app in apps]
    try:
        yield started
    finally:
        for one in started:
            one.stop()
