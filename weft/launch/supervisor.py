"""The front process of a server on this machine, from the start of its engines to the end.

    answer HTTP (not ready) ─▶ engines ready ─▶ serve ─▶ drain ─▶ stop

In every phase the supervisor waits for the same events, and the first one decides: a signal, the
end of the engines, the end of the HTTP server. In each case every open request gets an answer
first.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import psutil
from starlette.types import ASGIApp

from weft.config.limits import Limits
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.launch.console import Console
from weft.launch.context import LaunchContext
from weft.launch.engine_group import EngineGroup
from weft.launch.front import EngineLost, Front
from weft.launch.service_manager import READY, STOPPING, notify
from weft.launch.signals import LoopSignals
from weft.launch.watch import ExitStatus
from weft.observe import garbage
from weft.observe.trace import Tracer
from weft.server.serve import make_server
from weft.server.serve import run as run_loop

QUIET_S = 2.0  # after this time of loading, the user hears how far it is
LAST_ANSWERS_S = 3.0  # time for errors and ends of streams to reach their clients


def run(
    context: LaunchContext,
    listener: socket.socket,
    console: Console,
    group: EngineGroup,
    tracer: Tracer,
) -> ExitStatus:
    """Serve until a signal or a failure. The caller stops the engine processes."""
    return run_loop(_run(context, listener, console, group, tracer))


async def _run(
    context: LaunchContext,
    listener: socket.socket,
    console: Console,
    group: EngineGroup,
    tracer: Tracer,
) -> ExitStatus:
    """Build the front, supervise it, close it."""
    signals = LoopSignals()
    front = Front(context, group, tracer)
    garbage.freeze()  # imports and tokenizer stay; there is time while the engine loads
    num_engines = max(context.config.dp_size, 1)
    wanted = context.prepared.sizing.weight_bytes * num_engines
    async with front:
        return await supervise(
            front, context.config, context.limits, console, signals, listener, wanted
        )


class ReadyFront(Protocol):
    """What the console shows when a front is ready."""

    @property
    def startup(self) -> list[tuple[str, str, float]]: ...


class SupervisedFront(Protocol):
    """The front of one model or of several (`front.py`, `several/serve.py`)."""

    @property
    def app(self) -> ASGIApp: ...

    @property
    def refused(self) -> Callable[[str], None]:
        """Counts what exceeded a limit."""

    @property
    def lost(self) -> asyncio.Task[ExitStatus]: ...

    async def wait_ready(self) -> ReadyFront: ...

    async def drain(
        self,
        timeout_s: float,
        *,
        abort: asyncio.Event | None = None,
        on_progress: Callable[[int, float], None] = ...,
    ) -> ExitStatus: ...


async def supervise(
    front: SupervisedFront,
    config: ServerConfig,
    limits: Limits,
    console: Console,
    signals: LoopSignals,
    listener: socket.socket,
    wanted: int = 0,
) -> ExitStatus:
    """Answer HTTP until an event ends the server. `wanted`: bytes that the engines load, to show
    how far they are; 0: nothing is shown."""
    http = make_server(front.app, config, limits, front.refused)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    port: int = listener.getsockname()[1]
    try:
        supervisor = Supervisor(front, config, console, signals, port, wanted)
        end = await supervisor.run(serving)
    finally:
        http.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_ANSWERS_S)
        http.force_exit = True
        serving.cancel()
    if not end.reason:
        console.stopped()
    return end


class Supervisor:
    """Waits for events of the server from its start to its end, and acts on them."""

    def __init__(
        self,
        front: SupervisedFront,
        config: ServerConfig,
        console: Console,
        signals: LoopSignals,
        port: int,
        wanted: int,
    ) -> None:
        self._front = front
        self._config = config
        self._wanted = wanted
        self._console = console
        self._signals = signals
        self._port = port

    async def run(self, serving: asyncio.Task[None]) -> ExitStatus:
        """Run until an event ends the server. `serving`: the task of the HTTP server, which the
        caller ends."""
        ready = asyncio.create_task(self._front.wait_ready())
        progress = asyncio.create_task(self._show_progress())
        stop = asyncio.create_task(self._signals.stop.wait())
        lost = self._front.lost
        tasks: set[asyncio.Task[Any]] = {stop, lost, serving}
        try:
            await asyncio.wait({ready, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            progress.cancel()
            if ready.done() and not lost.done():
                self._console.ready(ready.result().startup, self._port)
                notify(READY)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return await self._drain()
            if lost.done():
                return lost.result()
            why = serving.exception() or "no reason given"
            return ExitStatus(1, f"the HTTP server has ended: {why}")
        except EngineLost as exc:
            return exc.end
        except SettingsError as exc:
            return ExitStatus(2, str(exc))
        finally:
            for task in (ready, stop, progress):
                task.cancel()
            if ready.done() and not ready.cancelled():
                ready.exception()  # retrieve it: `lost` has reported the reason

    async def _show_progress(self) -> None:
        """Show how far the engines are with loading, until this is cancelled."""
        await asyncio.sleep(QUIET_S)
        while self._wanted:
            resident = await asyncio.to_thread(memory_of_children)
            self._console.progress(resident, self._wanted)
            await asyncio.sleep(self._console.progress_every_s)

    async def _drain(self) -> ExitStatus:
        """Let open requests finish. A second signal ends them immediately."""
        notify(STOPPING)

        def on_progress(num_open: int, left_s: float) -> None:
            if left_s > 0:
                self._console.draining(num_open, left_s)
            else:
                self._console.aborting(num_open)

        timeout_s = self._config.drain_s
        return await self._front.drain(
            timeout_s, abort=self._signals.abort, on_progress=on_progress
        )


def memory_of_children() -> int:
    """Bytes of memory of the processes that this one has started, and of theirs."""
    num_bytes = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            num_bytes += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended
    return num_bytes
