"""The front of a server as an object: an ASGI application, and the engines that answer it.

    async with Front(context, engines, tracer) as front:
        await front.wait_ready()
        ...                     front.app answers, behind any ASGI server
        await front.drain(10.0)

`weft serve` adds its own HTTP server, signals and console (`supervisor.py`); other programs embed
the front (`embed.py`, `ray.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from weft.assemble.adapters import adapter_files
from weft.assemble.prepare import load_recipe, load_tokenizer
from weft.client.adapters import AdapterLoader, AdapterNames, AdapterRefused
from weft.client.client import EngineClient
from weft.config.adapters import LoraPath, parse_lora_paths
from weft.config.amounts import types
from weft.config.cache import outlives
from weft.config.options import SettingsError
from weft.config.resolve import kept_as
from weft.launch.context import LaunchContext
from weft.launch.engine_group import EngineGroup, journals
from weft.launch.engines import Engines, OneEngine
from weft.launch.model_catalog import StoreCatalog
from weft.launch.model_facts import model_facts
from weft.launch.watch import ExitStatus
from weft.messages.cache import SaveCache
from weft.messages.control import UnblockInput
from weft.messages.status import EngineReady
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.trace import NoTracer, Tracer
from weft.server.app import ModelApp, SharedParts, model_app, shared_parts, with_edge
from weft.server.context import ModelFacts, Readiness, ServerInfo
from weft.server.helpers import ModelHelpers, start_helpers
from weft.server.limits import LEAST_BYTES, spare_bytes
from weft.state.store import StateError
from weft.text.media.families import ProcessorRecipe
from weft.text.templates.chat_template import TemplateError
from weft.text.templates.renderer import TakeChild, none_ready
from weft.text.tokenizer import Tokenizer
from weft.version import __version__

TICK_S = 0.1  # interval in which a drain checks whether it is over
SAVE_GRACE_S = 2.0  # time for the engine's reply after the time limit of its write

log = EventLog("serve")


class EngineLost(Exception):
    """No engine is left; `end` has the reason."""

    def __init__(self, end: ExitStatus) -> None:
        super().__init__(end.reason)
        self.end = end


class FrontParts(NamedTuple):
    """What a front is built from beside its settings, and may outlive it."""

    tokenizer: Tokenizer
    processor: ProcessorRecipe | None
    metrics: Metrics
    facts: ModelFacts


def load_parts(context: LaunchContext) -> FrontParts:
    """Read what the front needs of the model. Takes as long as reading a tokenizer. Raises
    ModelError and SettingsError."""
    metrics = Metrics(context.model_name, context.config.metrics_compat)
    if context.prepared.gpu_uuid:
        metrics.watch_gpu(context.prepared.gpu_uuid)
    tokenizer = load_tokenizer(context.prepared.folder)
    facts = model_facts(context.prepared)
    return FrontParts(tokenizer, load_recipe(context.prepared), metrics, facts)


class Front:
    """A front that runs in one event loop. The processes in `group` have begun; the caller stops
    them."""

    def __init__(
        self,
        context: LaunchContext,
        group: EngineGroup,
        tracer: Tracer | None = None,
        *,
        parts: FrontParts | None = None,
        shared: SharedParts | None = None,
        helpers: ModelHelpers | None = None,
    ) -> None:
        """`parts`, `shared`, `helpers`: without them, the front makes its own. `helpers` close with
        it.

        Raises ModelError for a tokenizer that cannot be read, and SettingsError for a chat template
        that cannot be used, and for too little memory."""
        parts = parts or load_parts(context)
        _require_memory()
        self.readiness = Readiness()
        self.adapters = AdapterNames(
            adapter_files(context.prepared), context.model_name, *context.aliases
        )
        self._context = context
        self._engines = _engines(context, group, parts.metrics)
        self.client = _client(context, parts, self._engines, tracer or NoTracer())
        self.served = _served(
            context, parts, self.client, self.readiness, self.adapters, shared, helpers
        )
        self._lost: asyncio.Task[ExitStatus] | None = None

    @cached_property
    def app(self) -> ASGIApp:
        """The application of a server with this model alone."""
        context = self._context
        served = self.served
        return with_edge(
            served.routes,
            served.operations,
            context.config,
            context.limits,
            context.digests,
            self.client.metrics,
            served.context.refusals,
            served.context.batches,
        )

    async def __aenter__(self) -> Front:
        self._lost = asyncio.create_task(self._follow_engines())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lost.cancel()
        self._engines.close()
        self.readiness.end()

    @property
    def refused(self) -> Callable[[str], None]:
        """Counts what exceeded a limit."""
        return self.client.metrics.refused

    @property
    def lost(self) -> asyncio.Task[ExitStatus]:
        """Done when no engine is left; its result is the reason. All open requests have been
        answered by then."""
        assert self._lost is not None, "the front has not been entered"
        return self._lost

    async def wait_ready(self) -> EngineReady:
        """Wait until the server accepts requests. Raises `EngineLost` if an engine ends first, and
        SettingsError for adapters that cannot be loaded."""
        ready = asyncio.create_task(self._become_ready())
        try:
            await asyncio.wait({ready, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise EngineLost(self.lost.result())
            return ready.result()
        finally:
            ready.cancel()

    async def drain(
        self,
        timeout_s: float,
        *,
        abort: asyncio.Event | None = None,
        on_progress: Callable[[int, float], None] = lambda num_open, left_s: None,
    ) -> ExitStatus:
        """Refuse new requests, let open requests finish for `timeout_s`, then end the others.
        `abort` ends them immediately.

        `on_progress` is called at intervals with the number of open requests and the seconds left;
        at the end of the time, the seconds are 0.
        """
        client = self.client
        self.readiness.drain()
        ordered = asyncio.create_task((abort or asyncio.Event()).wait())
        deadline = time.monotonic() + timeout_s
        while client.num_open and not ordered.done() and not self.lost.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            on_progress(client.num_open, left_s)
            await asyncio.wait(
                {ordered, self.lost},
                timeout=min(TICK_S, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
        try:
            if self.lost.done():
                return self.lost.result()
            on_progress(client.num_open, 0.0)
            client.deliveries.end_all("the server has been stopped")
            await self.save_cache(deadline - time.monotonic(), ordered)
        finally:
            ordered.cancel()
        return ExitStatus(0)

    async def load_adapters(self, asked: Sequence[LoraPath]) -> None:
        """Load adapters that an earlier front of the same model had. One that cannot be loaded any
        more is logged, and unknown from now on."""
        loader = AdapterLoader(self.adapters, self.client)
        for one in asked:
            if one.name in self.adapters.by_name:
                continue
            try:
                await loader.load(one)
            except AdapterRefused as exc:
                log.warning("adapter_not_loaded_again", name=one.name, reason=exc)

    async def _follow_engines(self) -> ExitStatus:
        end = await self._engines.run(self.client)
        if self.client.state.is_alive:
            self.client.engine_lost(end.reason)
        return end

    async def _become_ready(self) -> EngineReady:
        ready = await self.client.state.wait_ready()
        if self.client.session_keeper is not None:
            await self.client.session_keeper.restore(self.client)
        loader = AdapterLoader(self.adapters, self.client)
        for asked in parse_lora_paths(self._context.prepared.config.lora_paths):
            try:
                await loader.load(asked)
            except AdapterRefused as exc:
                raise SettingsError(
                    f"--lora-paths: the adapter {asked.name!r} cannot be loaded: {exc}"
                ) from exc
        if self._context.config.start_ramp_s:
            await self.client.call(UnblockInput(ramp_s=self._context.config.start_ramp_s))
        self.readiness.mark_ready()
        return ready

    async def save_cache(self, left_s: float, abort: asyncio.Task[Any] | None = None) -> None:
        """Let the engine write its cache to disk for `left_s` seconds. `abort` (a second signal)
        stops the wait immediately."""
        if not outlives(self._context.prepared.config):
            return
        left_s = max(left_s, 0.0)
        save = asyncio.create_task(self.client.call(SaveCache(left_s), left_s + SAVE_GRACE_S))
        waited: set[asyncio.Task[Any]] = {save, self.lost}
        if abort is not None:
            waited.add(abort)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not save.done():
            save.cancel()
        elif save.exception() is None:
            log.info("cache_saved", bytes=save.result().written_bytes)


def _engines(context: LaunchContext, group: EngineGroup, metrics: Metrics) -> Engines:
    if len(group.processes) == 1:
        return OneEngine(group.processes[0], context.config)
    from weft.launch.replicas import Replicas

    return Replicas(group, context, metrics)


def _client(
    context: LaunchContext,
    parts: FrontParts,
    engines: Engines,
    tracer: Tracer,
) -> EngineClient:
    config = context.config
    limits = context.limits
    return EngineClient(
        parts.tokenizer,
        engines.send,
        metrics=parts.metrics,
        tracer=tracer,
        log_requests=config.log_requests,
        log_slow_s=config.log_slow_s,
        max_pending_tokens=limits.max_pending_tokens,
        max_request_share=limits.max_request_share,
        step_timeout_s=config.step_timeout_s,
        clamp_max_tokens=config.clamp_max_tokens,
        hang_after_s=config.hang_after_s,
    )


def _served(
    context: LaunchContext,
    parts: FrontParts,
    client: EngineClient,
    readiness: Readiness,
    adapters: AdapterNames,
    shared: SharedParts | None,
    helpers: ModelHelpers | None,
) -> ModelApp:
    """Raises SettingsError for a chat template or a state folder that cannot be used."""
    config = context.config
    try:
        return model_app(
            client,
            parts.tokenizer,
            config,
            _info(context, parts.facts),
            readiness,
            context.limits,
            adapters,
            helpers or front_helpers(context, parts),
            context.prepared.config.plugins,
            shared=shared or shared_parts(config, readiness, context.limits, StoreCatalog()),
            has_keys=bool(context.digests.user or context.digests.admin),
        )
    except StateError as exc:
        raise SettingsError(f"--state-dir is {config.state_dir}: {exc}") from exc


def front_helpers(
    context: LaunchContext, parts: FrontParts, take_child: TakeChild = none_ready
) -> ModelHelpers:
    """The helpers of a front; they end with the calling thread. `take_child`: as that of
    `Renderer`. Raises SettingsError for a chat template that cannot be used, and for settings of
    media."""
    config = context.config
    try:
        return start_helpers(parts.tokenizer, config, context.limits, parts.processor, take_child)
    except (TemplateError, OSError, UnicodeDecodeError) as exc:
        reason = str(exc)
        if isinstance(exc, OSError):
            reason = exc.strerror or reason
        elif isinstance(exc, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise SettingsError(
            f"--chat-template is {config.chat_template}, which cannot be used: {reason}"
        ) from exc


def _require_memory() -> None:
    """Raise SettingsError if too little address space is left to serve requests."""
    spare = spare_bytes()
    if spare < LEAST_BYTES:
        raise SettingsError(
            f"the address space is limited (ulimit -v), and {spare / 1e6:.0f} MB are left beside "
            f"what is loaded; a server needs at least {LEAST_BYTES / 1e6:,.0f} MB"
        )


def _info(context: LaunchContext, facts: ModelFacts) -> ServerInfo:
    model = context.prepared.model
    config = context.prepared.config
    in_types = types(kept_as(config, model))
    return ServerInfo(
        model_name=context.model_name,
        aliases=context.aliases,
        context_length=config.context_length,
        version=__version__,
        started_at=time.time(),
        model_summary=f"{model.name} ({model.architecture}, {in_types})",
        sampling=context.prepared.sampling,
        model=facts,
        settings=asdict(config),
        journals=journals(config, context.config.dp_size),
    )
