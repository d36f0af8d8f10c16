"""The HTTP application before a real engine, all of it in one event loop: for tests of what only a
model can tell."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.server.template_here import rendering_here
from weft.assemble.adapters import adapter_files
from weft.assemble.build import Built, build_engine
from weft.assemble.prepare import Prepared, load_recipe, load_tokenizer, prepare
from weft.client.adapters import AdapterNames
from weft.client.client import EngineClient
from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.machine import Machine
from weft.config.server import ServerConfig
from weft.messages.codec import FromEngine, ToEngine, decode_from_engine, decode_to_engine, encode
from weft.server.app import create_app
from weft.server.context import Readiness, ServerInfo

T = TypeVar("T")
MACHINE = Machine(
    cores=1, free_bytes=4_000_000_000, total_bytes=4_000_000_000, gpus=(), no_gpu_reason="none"
)


class RealServer:
    """`post` and `get` run the loop until the answer is there; the engine steps meanwhile."""

    def __init__(
        self, built: Built, prepared: Prepared, limits: Limits, config: ServerConfig
    ) -> None:
        folder = prepared.folder
        self.engine = built.engine
        self.seen: list[ToEngine] = []
        self.hold = False  # no step is made
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self.tokenizer = load_tokenizer(folder)
        self.client = EngineClient(self.tokenizer, self._send)
        self.client.deliver(built.ready)
        self.readiness = Readiness()
        self.readiness.mark_ready()
        info = ServerInfo(
            model_name="tiny",
            aliases=("little",),
            context_length=built.ready.context_length,
            version="0",
            started_at=time.time(),
        )
        with rendering_here():
            app = create_app(
                self.client,
                self.tokenizer,
                config,
                info,
                self.readiness,
                limits,
                adapters=AdapterNames(adapter_files(prepared), "tiny", "little"),
                processor=load_recipe(prepared),
            )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=240
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.wait(self.http.post(path, json=body))

    def get(self, path: str) -> httpx.Response:
        return self.wait(self.http.get(path))

    def wait(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await asyncio.wait_for(work, 240)

        return self._loop.run_until_complete(run())

    def close(self) -> None:
        self.wait(self.http.aclose())
        self.readiness.end()
        self._loop.close()

    def _send(self, message: ToEngine) -> None:
        """Through the codec, as on the real way."""
        message = decode_to_engine(encode(message))
        self.seen.append(message)
        reply = self.engine.submit(message)
        if reply is not None:
            self._answer(reply)
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while self.engine.has_work:
            await asyncio.sleep(0.005 if self.hold else 0)
            if not self.hold:
                for reply in self.engine.step():
                    self._answer(reply)

    def _answer(self, reply: FromEngine) -> None:
        data = encode(reply)
        self._loop.call_soon(lambda: self.client.deliver(decode_from_engine(data)))


@contextlib.contextmanager
def serving(
    folder: Path,
    limits: Limits | None = None,
    config: ServerConfig | None = None,
    **settings: Any,
) -> Iterator[RealServer]:
    """The model in `folder`, with these settings of the server and of the engine."""
    prepared = prepare(
        EngineConfig(model=str(folder), device="cpu", threads=1, **settings), MACHINE
    )
    built = build_engine(prepared.config, prepared.folder)
    server = RealServer(built, prepared, limits or Limits(), config or ServerConfig())
    try:
        yield server
    finally:
        server.close()
        built.runner.close()
