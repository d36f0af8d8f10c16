"""Watches one engine process from the front: its messages, its end, and hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from weft.client.engine_state import TICK_S, HangDetector
from weft.config.server import ServerConfig
from weft.launch.engine_process import EngineProcess, explain_exit
from weft.launch.processor_use import ProcessorUse
from weft.messages.channel import AsyncReceiver
from weft.messages.codec import FromEngine, Unreadable
from weft.messages.status import EngineFailed
from weft.observe.log import EventLog

LAST_WORDS_S = 0.5  # time for the last message of an engine that has ended

log = EventLog("serve")


class ExitStatus(NamedTuple):
    """How an engine, or the server, ended."""

    status: int  # exit status of the process
    reason: str = ""  # for the user, unless the user asked for the end


class EngineWatch:
    """Receives the engine's messages, and finds out how it ended."""

    def __init__(
        self, process: EngineProcess, receiver: AsyncReceiver[FromEngine | Unreadable]
    ) -> None:
        self._process = process
        self._receiver = receiver
        self._use = ProcessorUse([process.pid])
        self._failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()

    async def receive(self) -> FromEngine | Unreadable:
        """The next message that is not `EngineFailed`; `end` handles those."""
        while True:
            message = await self._receiver.receive()
            if not isinstance(message, EngineFailed):
                return message
            if not self._failed.done():
                self._failed.set_result(message)

    async def end(self) -> ExitStatus:
        """Wait until the engine has failed or ended. Returns the reason: the engine's own message
        if it sent one."""
        ended = asyncio.create_task(self._process.ended())
        either: set[asyncio.Future[Any]] = {ended, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({self._failed}, timeout=LAST_WORDS_S)
        if self._failed.done():
            ended.cancel()
            failure = self._failed.result()
            status = 2 if failure.user_error else 1
            return ExitStatus(status, failure.message)
        return ExitStatus(1, explain_exit(ended.result()))

    def processor_share(self, passed_s: float, *, is_silent: bool) -> float:
        """The part of the processor time that the engine wanted and got in the `passed_s` since the
        last call, 0 to 1. An engine that is not silent is not looked at, and has 1."""
        if not is_silent:
            self._use.forget()
            return 1.0
        use = self._use.look(passed_s)
        return 1.0 if use is None else use.share


class HangWatch:
    """Checks at intervals whether an engine hangs; calls `on_hang` and `on_recovery`."""

    def __init__(
        self,
        engine: EngineWatch,
        detector: HangDetector,
        *,
        on_hang: Callable[[str], None],
        on_recovery: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._detector = detector
        self._on_hang = on_hang
        self._on_recovery = on_recovery

    async def run(self, config: ServerConfig) -> ExitStatus:
        """Run until the engine has hung for `hang_timeout_s`, if `on_hang` is "exit"; else forever.
        The engine must be ready."""
        known = ""  # the reported hang
        hung_s = 0.0
        now = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            before = now
            now = time.monotonic()
            passed_s = now - before
            is_silent = self._detector.is_silent
            share = self._engine.processor_share(passed_s, is_silent=is_silent)
            self._detector.tick(passed_s, processor_share=share)
            hang = self._detector.hang
            if hang and not known:
                hung_s = 0.0
                self._on_hang(hang)
            elif hang:
                hung_s += TICK_S
            elif known:
                log.warning("engine_recovered", after_s=hung_s)
                hung_s = 0.0
                self._on_recovery()
            known = hang
            if hang and hung_s >= config.hang_timeout_s and config.on_hang == "exit":
                return ExitStatus(1, hang)
