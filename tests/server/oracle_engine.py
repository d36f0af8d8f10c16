"""A scheduler behind a server in the place of its fake engine; its model is an oracle."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.scheduler.oracle_runner import OracleRunner
from tests.server.fake import CONTEXT, READY, RunningServer
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine, decode_from_engine, decode_to_engine, encode
from weft.messages.requests import GenerateRequest
from weft.scheduler.settings import SchedulerSettings, SessionLimits

PAGE = 4
SETTINGS = SchedulerSettings(
    num_pages=500,
    page_size=PAGE,
    max_running_requests=8,
    context_length=CONTEXT,
    vocab_size=READY.vocab_size,
    sessions=SessionLimits(max_sessions=3, max_tokens=1_000),
    mixed_chunk=False,
    aging_s=0.0,
)


class OracleEngine:
    """A scheduler in the place of the fake engine: steps in the server's event loop."""

    def __init__(self, server: RunningServer, settings: SchedulerSettings = SETTINGS) -> None:
        self.running: dict[int, Any] = {}  # what the fake's users look at
        self.seen: list[GenerateRequest] = []
        self.is_held = False  # requests stay where they are
        self._server = server
        runner = OracleRunner(settings.num_pages * PAGE, 8, CONTEXT, settings.vocab_size)
        self.engine = Engine(
            settings, runner, clock=lambda: 0.0, overlap=0, on_failure=lambda exc: None
        )

    def send(self, message: ToEngine) -> None:
        message = decode_to_engine(encode(message))
        if isinstance(message, GenerateRequest):
            self.seen.append(message)
        reply = self.engine.submit(message)
        if reply is not None:
            self._answer(reply)
        asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        for reply in self.engine.step():
            self._answer(reply)
        if self.engine.has_work:
            asyncio.get_running_loop().call_later(0.02 if self.is_held else 0, self._step)

    def _answer(self, reply: FromEngine) -> None:
        data = encode(reply)
        asyncio.get_running_loop().call_soon(
            lambda: self._server.client.deliver(decode_from_engine(data))
        )
