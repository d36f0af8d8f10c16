"""The front process of a server on this machine, from the start of its engine to the end.

    answer HTTP (not ready) ─▶ engine ready ─▶ serve ─▶ drain ─▶ stop

In every phase the same few things are waited for together, and the first that happens decides: a
signal, the end of the engine, the end of HTTP.
Whatever it is, every open request gets an answer first.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import zmq

from weft.assemble.prepare import Prepared, load_tokenizer
from weft.client.client import EngineClient
from weft.client.hang_detector import TICK_S as HANG_TICK_S
from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.options import SettingsError
from weft.config.process import EngineArgs
from weft.config.server import ServerConfig
from weft.launch.console import Console
from weft.launch.engine_process import EngineProcess, explain_exit
from weft.launch.run_queue import RunQueue
from weft.messages.channel import AsyncReceiver, Sender
from weft.messages.codec import FromEngine, Unreadable, read_from_engine
from weft.messages.status import EngineFailed
from weft.observe import garbage
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.trace import Tracer
from weft.server.app import create_app
from weft.server.context import Readiness, ServerInfo
from weft.server.limits import LEAST_BYTES, spare_bytes
from weft.server.serve import make_server
from weft.server.serve import run as run_loop
from weft.text.templates.chat_template import TemplateError
from weft.version import __version__

LAST_WORDS_S = 0.5  # for the message of an engine that has ended
LAST_ANSWERS_S = 3.0  # for errors and ends of streams to reach their clients
TICK_S = 0.1  # of the countdown

log = EventLog("serve")


class ExitStatus(NamedTuple):
    """How the server ended."""

    status: int  # of the process
    reason: str = ""  # for the person who started it, if it did not end by his will


def run(
    prepared: Prepared,
    config: ServerConfig,
    limits: Limits,
    digests: KeyDigests,
    tracer: Tracer,
    listener: socket.socket,
    console: Console,
    process: EngineProcess,
    args: EngineArgs,
) -> ExitStatus:
    """Serve what `process` computes on `listener`, until a signal or a failure.
    Leaves the process to the caller.
    """
    return run_loop(
        _run(prepared, config, limits, digests, tracer, listener, console, process, args)
    )


async def _run(
    prepared: Prepared,
    config: ServerConfig,
    limits: Limits,
    digests: KeyDigests,
    tracer: Tracer,
    listener: socket.socket,
    console: Console,
    process: EngineProcess,
    args: EngineArgs,
) -> ExitStatus:
    """Put the front together, supervise it, take it apart."""
    signals = Signals()
    receiver = AsyncReceiver(zmq.Context(), args.from_engine, read_from_engine, bind=True)
    sender = Sender(zmq.Context(), args.to_engine, bind=True)
    tokenizer = load_tokenizer(prepared.folder)
    _require_memory()
    info = _info(prepared, config)
    client = EngineClient(
        tokenizer,
        sender.send,
        metrics=Metrics(info.model_name, config.metrics_compat),
        tracer=tracer,
        log_requests=config.log_requests,
        max_pending_tokens=limits.max_pending_tokens,
        max_request_share=limits.max_request_share,
        step_timeout_s=config.step_timeout_s,
        clamp_max_tokens=config.clamp_max_tokens,
        hang_after_s=config.hang_after_s,
    )
    client.metrics.processes.add("engine", process.pid)
    readiness = Readiness()
    try:
        app = create_app(client, tokenizer, config, info, readiness, limits, digests)
        http = make_server(app, config, limits, client.metrics.refused)
    except (TemplateError, OSError) as exc:
        raise SettingsError(
            f"--chat-template is {config.chat_template}, which cannot be used: {exc}"
        ) from exc
    engine = EngineWatch(process, receiver)
    receiving = asyncio.create_task(client.run(engine.receive))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        supervisor = Supervisor(
            client, readiness, engine, RunQueue(process.pid), signals, console, config
        )
        end = await supervisor.run(serving, listener.getsockname()[1])
    finally:
        http.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_ANSWERS_S)
        http.force_exit = True
        serving.cancel()
        receiving.cancel()
        receiver.close()
        sender.close()
    if not end.reason:
        console.stopped()
    return end


def _require_memory() -> None:
    """Raise SettingsError where requests would find no memory."""
    spare = spare_bytes()
    if spare < LEAST_BYTES:
        raise SettingsError(
            f"the address space is limited (ulimit -v), and {spare / 1e6:.0f} MB are left beside "
            f"what is loaded; a server needs at least {LEAST_BYTES / 1e6:,.0f} MB"
        )


def _info(prepared: Prepared, config: ServerConfig) -> ServerInfo:
    model = prepared.model
    return ServerInfo(
        model_name=config.served_model_name or model.name,
        context_length=prepared.config.context_length,
        version=__version__,
        started_at=time.time(),
        model_summary=f"{model.name} ({model.architecture}, {prepared.config.dtype})",
        sampling=prepared.sampling,
        settings=asdict(prepared.config),
    )


class Signals:
    """SIGINT, SIGTERM, SIGHUP: the first of them asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.abort = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.abort if self.stop.is_set() else self.stop).set()


class EngineWatch:
    """Reads from the engine, and knows how it ended."""

    def __init__(
        self, process: EngineProcess, receiver: AsyncReceiver[FromEngine | Unreadable]
    ) -> None:
        self._process = process
        self._receiver = receiver
        self._failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()

    async def receive(self) -> FromEngine | Unreadable:
        """The next message but `EngineFailed`, which is for `end`."""
        while True:
            message = await self._receiver.receive()
            if not isinstance(message, EngineFailed):
                return message
            if not self._failed.done():
                self._failed.set_result(message)

    async def end(self) -> ExitStatus:
        """Wait until the engine has failed or ended, and say why:
        in its own words, if it had any.
        """
        ended = asyncio.create_task(self._process.ended())
        either: set[asyncio.Future[Any]] = {ended, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({self._failed}, timeout=LAST_WORDS_S)
        if self._failed.done():
            ended.cancel()
            failure = self._failed.result()
            return ExitStatus(2 if failure.user_error else 1, failure.message)
        return ExitStatus(1, explain_exit(ended.result()))


class Supervisor:
    """Follows the server from loading to its end."""

    def __init__(
        self,
        client: EngineClient,
        readiness: Readiness,
        engine: EngineWatch,
        run_queue: RunQueue,
        signals: Signals,
        console: Console,
        config: ServerConfig,
    ) -> None:
        self._client = client
        self._readiness = readiness
        self._engine = engine
        self._run_queue = run_queue
        self._signals = signals
        self._console = console
        self._config = config

    async def run(self, serving: asyncio.Task[None], port: int) -> ExitStatus:
        """Until something ends it. `serving` is HTTP, which nobody but the caller ends."""
        ready = asyncio.create_task(self._client.wait_ready())
        stop = asyncio.create_task(self._signals.stop.wait())
        lost = asyncio.create_task(self._engine.end())
        hung = asyncio.create_task(self._watch_for_hang())
        tasks: set[asyncio.Task[Any]] = {ready, stop, lost, hung, serving}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                garbage.freeze()  # imports and tokenizer stay
                self._readiness.mark_ready()
                self._console.ready(ready.result(), port)
                await asyncio.wait(tasks - {ready}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return await self._drain(lost)
            if lost.done():
                if self._client.alive:
                    self._client.engine_lost(lost.result().reason)
                return lost.result()
            if hung.done():
                self._client.engine_lost(hung.result().reason)
                return hung.result()
            return ExitStatus(
                1, f"the HTTP server has ended: {serving.exception() or 'no reason given'}"
            )
        finally:
            for task in (ready, stop, lost, hung):
                task.cancel()

    async def _watch_for_hang(self) -> ExitStatus:
        """Look whether the engine hangs. As soon as new work is refused for that, what is open ends
        with an error, too. Whether the server ends if it lasts is a setting.
        """
        client = self._client
        config = self._config
        await client.wait_ready()
        told = ""
        hung_s = 0.0
        now = time.monotonic()
        while True:
            await asyncio.sleep(HANG_TICK_S)
            before = now
            now = time.monotonic()
            client.hang_detector.tick(
                now - before, is_engine_queued=self._run_queue.holds_up(now - before)
            )
            hang = client.hang_detector.hang
            client.metrics.responds(not hang)
            if hang and not told:
                log.error("engine_hangs", reason=hang, open=client.num_open)
                client.end_all(hang)
            elif told and not hang:
                log.warning("engine_recovered", after_s=hung_s)
            hung_s = hung_s + HANG_TICK_S if told and hang else 0.0
            told = hang
            if hang and hung_s >= config.hang_timeout_s and config.on_hang == "exit":
                return ExitStatus(1, f"{hang}; the server ends (--on-hang)")

    async def _drain(self, lost: asyncio.Task[ExitStatus]) -> ExitStatus:
        """Take nothing new, let what is open end for a while, then end it.
        A second signal ends it at once.
        """
        client = self._client
        self._readiness.drain()
        abort = asyncio.create_task(self._signals.abort.wait())
        deadline = time.monotonic() + self._config.drain_s
        while (
            client.num_open
            and not abort.done()
            and not lost.done()
            and (left_s := deadline - time.monotonic()) > 0
        ):
            self._console.draining(client.num_open, left_s)
            await asyncio.wait(
                {abort, lost}, timeout=min(TICK_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
        abort.cancel()
        if lost.done():
            client.engine_lost(lost.result().reason)
            return lost.result()
        self._console.aborting(client.num_open)
        client.end_all("the server has been stopped")
        return ExitStatus(0)
