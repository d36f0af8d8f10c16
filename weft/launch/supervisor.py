"""The front process of a server on this machine, from the start of its engine to the end.

    answer HTTP (not ready) ─▶ engine ready ─▶ serve ─▶ drain ─▶ stop

In every phase the same few things are waited for together, and the first that happens decides: a
signal, the end of the engine, the end of HTTP.
Whatever it is, every open request gets an answer first.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import zmq

from weft.assemble.adapters import adapter_files
from weft.assemble.prepare import load_processor, load_tokenizer
from weft.client.adapters import AdapterLoader, AdapterNames, AdapterRefused
from weft.client.client import EngineClient
from weft.client.engine_state import TICK_S as HANG_TICK_S
from weft.config.adapters import parse_lora_paths
from weft.config.options import SettingsError
from weft.launch.context import LaunchContext
from weft.launch.engine_process import EngineProcess, explain_exit
from weft.launch.run_queue import RunQueue
from weft.launch.signals import LoopSignals
from weft.messages.cache import SaveCache
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
from weft.server.serve import HttpServer, make_server
from weft.server.serve import run as run_loop
from weft.text.templates.chat_template import TemplateError
from weft.text.tokenizer import Tokenizer
from weft.version import __version__

LAST_WORDS_S = 0.5  # for the message of an engine that has ended
LAST_ANSWERS_S = 3.0  # for errors and ends of streams to reach their clients
TICK_S = 0.1  # of the countdown
SAVE_GRACE_S = 2.0  # for the engine to say what it has written, behind its time

log = EventLog("serve")


class ExitStatus(NamedTuple):
    """How the server ended."""

    status: int  # of the process
    reason: str = ""  # for the person who started it, if it did not end by his will


def run(context: LaunchContext, process: EngineProcess, tracer: Tracer) -> ExitStatus:
    """Serve what `process` computes, until a signal or a failure.
    Leaves the process to the caller.
    """
    return run_loop(_run(context, process, tracer))


async def _run(context: LaunchContext, process: EngineProcess, tracer: Tracer) -> ExitStatus:
    """Put the front together, supervise it, take it apart."""
    signals = LoopSignals()
    args = process.args
    receiver = AsyncReceiver(zmq.Context(), args.from_engine, read_from_engine, bind=True)
    sender = Sender(zmq.Context(), args.to_engine, bind=True)
    tokenizer = load_tokenizer(context.prepared.folder)
    _require_memory()
    client = _client(context, tokenizer, sender, tracer)
    client.metrics.processes.add("engine", process.pid)
    readiness = Readiness()
    adapters = AdapterNames(adapter_files(context.prepared))
    http = _http(context, tokenizer, client, readiness, adapters)
    garbage.freeze()  # imports and tokenizer stay; there is time while the engine loads
    engine = EngineWatch(process, receiver)
    receiving = asyncio.create_task(client.run(engine.receive))
    serving = asyncio.create_task(http.serve(sockets=[context.listener]))
    try:
        end = await Supervisor(context, client, readiness, engine, signals, adapters).run(serving)
    finally:
        http.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_ANSWERS_S)
        http.force_exit = True
        serving.cancel()
        receiving.cancel()
        receiver.close()
        sender.close()
    if not end.reason:
        context.console.stopped()
    return end


def _client(
    context: LaunchContext, tokenizer: Tokenizer, sender: Sender, tracer: Tracer
) -> EngineClient:
    config = context.config
    limits = context.limits
    return EngineClient(
        tokenizer,
        sender.send,
        metrics=Metrics(context.model_name, config.metrics_compat),
        tracer=tracer,
        log_requests=config.log_requests,
        max_pending_tokens=limits.max_pending_tokens,
        max_request_share=limits.max_request_share,
        step_timeout_s=config.step_timeout_s,
        clamp_max_tokens=config.clamp_max_tokens,
        hang_after_s=config.hang_after_s,
    )


def _http(
    context: LaunchContext,
    tokenizer: Tokenizer,
    client: EngineClient,
    readiness: Readiness,
    adapters: AdapterNames,
) -> HttpServer:
    """Raises SettingsError for a chat template that cannot be used."""
    config = context.config
    limits = context.limits
    try:
        app = create_app(
            client,
            tokenizer,
            config,
            _info(context),
            readiness,
            limits,
            context.digests,
            adapters,
            load_processor(context.prepared.folder, context.prepared.model),
        )
        return make_server(app, config, limits, client.metrics.refused)
    except (TemplateError, OSError) as exc:
        raise SettingsError(
            f"--chat-template is {config.chat_template}, which cannot be used: {exc}"
        ) from exc


def _require_memory() -> None:
    """Raise SettingsError where requests would find no memory."""
    spare = spare_bytes()
    if spare < LEAST_BYTES:
        raise SettingsError(
            f"the address space is limited (ulimit -v), and {spare / 1e6:.0f} MB are left beside "
            f"what is loaded; a server needs at least {LEAST_BYTES / 1e6:,.0f} MB"
        )


def _info(context: LaunchContext) -> ServerInfo:
    model = context.prepared.model
    config = context.prepared.config
    return ServerInfo(
        model_name=context.model_name,
        context_length=config.context_length,
        version=__version__,
        started_at=time.time(),
        model_summary=f"{model.name} ({model.architecture}, {config.dtype})",
        sampling=context.prepared.sampling,
        settings=asdict(config),
    )


class EngineWatch:
    """Reads from the engine, and knows how it ended."""

    def __init__(
        self, process: EngineProcess, receiver: AsyncReceiver[FromEngine | Unreadable]
    ) -> None:
        self._process = process
        self._receiver = receiver
        self._run_queue = RunQueue(process.pid)
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
            status = 2 if failure.user_error else 1
            return ExitStatus(status, failure.message)
        return ExitStatus(1, explain_exit(ended.result()))

    def lacks_processor(self, passed_s: float) -> bool:
        """Whether the engine wanted to run in the `passed_s` since the last call, and could not."""
        return self._run_queue.holds_up(passed_s)


class Supervisor:
    """Follows the server from loading to its end."""

    def __init__(
        self,
        context: LaunchContext,
        client: EngineClient,
        readiness: Readiness,
        engine: EngineWatch,
        signals: LoopSignals,
        adapters: AdapterNames,
    ) -> None:
        self._adapters = adapters
        self._context = context
        self._client = client
        self._readiness = readiness
        self._engine = engine
        self._signals = signals

    async def run(self, serving: asyncio.Task[None]) -> ExitStatus:
        """Until something ends it. `serving` is HTTP, which only the caller ends."""
        ready = asyncio.create_task(self._client.state.wait_ready())
        stop = asyncio.create_task(self._signals.stop.wait())
        lost = asyncio.create_task(self._engine.end())
        hung = asyncio.create_task(self._watch_for_hang())
        tasks: set[asyncio.Task[Any]] = {ready, stop, lost, hung, serving}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                loaded = asyncio.create_task(self._load_adapters())
                tasks = tasks - {ready}
                await asyncio.wait({loaded, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                if not loaded.done():
                    loaded.cancel()
                elif loaded.result():
                    return ExitStatus(2, loaded.result())
                else:
                    self._readiness.mark_ready()
                    self._context.console.ready(ready.result(), self._context.port)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return await self._drain(lost)
            if lost.done():
                if self._client.state.is_alive:
                    self._client.engine_lost(lost.result().reason)
                return lost.result()
            if hung.done():
                self._client.engine_lost(hung.result().reason)
                return hung.result()
            why = serving.exception() or "no reason given"
            return ExitStatus(1, f"the HTTP server has ended: {why}")
        finally:
            for task in (ready, stop, lost, hung):
                task.cancel()

    async def _load_adapters(self) -> str:
        """Load the adapters that the settings name. Returns what is wrong with one, if it is."""
        loader = AdapterLoader(self._adapters, self._client)
        for asked in parse_lora_paths(self._context.prepared.config.lora_paths):
            try:
                await loader.load(asked)
            except AdapterRefused as exc:
                return f"--lora-paths: the adapter {asked.name!r} cannot be loaded: {exc}"
        return ""

    async def _watch_for_hang(self) -> ExitStatus:
        """Look whether the engine hangs. As soon as new work is refused for that, what is open ends
        with an error, too. Whether the server ends if it lasts is a setting.
        """
        client = self._client
        config = self._context.config
        await client.state.wait_ready()
        known = ""  # the hang that was reported
        hung_s = 0.0
        now = time.monotonic()
        while True:
            await asyncio.sleep(HANG_TICK_S)
            before = now
            now = time.monotonic()
            is_queued = self._engine.lacks_processor(now - before)
            client.state.hang_detector.tick(now - before, is_engine_queued=is_queued)
            hang = client.state.hang_detector.hang
            client.metrics.responds(not hang)
            if hang and not known:
                hung_s = 0.0
                log.error("engine_hangs", reason=hang, open=client.num_open)
                client.end_all(hang)
            elif hang:
                hung_s += HANG_TICK_S
            elif known:
                log.warning("engine_recovered", after_s=hung_s)
                hung_s = 0.0
            known = hang
            if hang and hung_s >= config.hang_timeout_s and config.on_hang == "exit":
                return ExitStatus(1, f"{hang}; the server ends (--on-hang)")

    async def _save_cache(self, deadline: float, lost: asyncio.Task[ExitStatus]) -> None:
        """Let the engine write what is cached, until the server ends: at once with another
        signal."""
        if not self._context.prepared.config.cache_dir:
            return
        left_s = max(deadline - time.monotonic(), 0.0)
        save = asyncio.create_task(self._client.call(SaveCache(left_s), left_s + SAVE_GRACE_S))
        abort = asyncio.create_task(self._signals.abort.wait())
        await asyncio.wait({save, abort, lost}, return_when=asyncio.FIRST_COMPLETED)
        abort.cancel()
        if not save.done():
            save.cancel()
        elif save.exception() is None:
            log.info("cache_saved", bytes=save.result().written_bytes)

    async def _drain(self, lost: asyncio.Task[ExitStatus]) -> ExitStatus:
        """Take nothing new, let what is open end for a while, then end it.
        A second signal ends it at once.
        """
        client = self._client
        console = self._context.console
        self._readiness.drain()
        abort = asyncio.create_task(self._signals.abort.wait())
        deadline = time.monotonic() + self._context.config.drain_s
        while client.num_open and not abort.done() and not lost.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            console.draining(client.num_open, left_s)
            await asyncio.wait(
                {abort, lost},
                timeout=min(TICK_S, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
        abort.cancel()
        if lost.done():
            client.engine_lost(lost.result().reason)
            return lost.result()
        console.aborting(client.num_open)
        client.end_all("the server has been stopped")
        await self._save_cache(deadline, lost)
        return ExitStatus(0)
