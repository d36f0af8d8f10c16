"""`weft serve` with several models: settings, checks, port; then the front answers, and models come
and go."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp

from weft.config.amounts import size
from weft.config.engine import EngineConfig
from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.machine import Machine, probe
from weft.config.options import Settings, SettingsError
from weft.config.server import ServerConfig
from weft.config.several import ModelsConfig
from weft.launch.console import Console
from weft.launch.engine_group import EngineGroup
from weft.launch.listen import listen
from weft.launch.model_catalog import StoreCatalog
from weft.launch.open_files import fit
from weft.launch.several.ahead import read_ahead
from weft.launch.several.blank import blank_app
from weft.launch.several.hosted import HostedModel, HouseParts
from weft.launch.several.house import House
from weft.launch.several.roster import HouseRoster
from weft.launch.several.spare import SpareTemplate
from weft.launch.several.specs import ModelSpec, names_of, offered_later, read_specs
from weft.launch.signals import LoopSignals, StartSignals, Stopped
from weft.launch.supervisor import supervise
from weft.launch.watch import ExitStatus
from weft.observe import garbage
from weft.observe import log as logs
from weft.observe.log import EventLog
from weft.observe.several import HouseMetrics
from weft.observe.trace import Tracer, make_tracer
from weft.residency.rules import Rules
from weft.server.app import shared_parts, with_edge
from weft.server.context import Readiness
from weft.server.errors import ApiError
from weft.server.serve import run as run_loop
from weft.server.several.app import SeveralModels
from weft.state.store import StateError
from weft.store.store import ModelStore

# Part of the free memory that the models take without --memory.
SHARE_OF_FREE = 0.9
STARTERS = 2  # models whose helper processes start at a time
TICK_S = 0.1  # interval in which a drain checks whether it is over
STORE_S = 1.0  # time for which the list of the store is taken for true

log = EventLog("models")


class Started(NamedTuple):
    """What the console shows when the server accepts requests."""

    startup: list[tuple[str, str, float]]  # phases with their seconds


class ManyModels:
    """The settings of a server with several models, after all checks that load nothing."""

    def __init__(self, settings: Settings, config: ServerConfig, digests: KeyDigests) -> None:
        """Raises SettingsError and ModelError."""
        self.settings = settings
        self.config = config
        self.digests = digests
        self.several = settings.make(ModelsConfig)
        self.store = ModelStore(self.several.models_dir)
        self.catalog = StoreCatalog(self.store)
        self.specs = read_specs(settings, self.store)
        if not (self.specs or self.several.models_dir or self.several.models_store):
            raise SettingsError("no model is named")
        self.machine: Machine = probe()
        self.asked_limits = settings.make(Limits)
        self.limits = fit(self.asked_limits)

    @property
    def budget_bytes(self) -> int:
        if self.several.memory:
            return int(self.several.memory * 1e9)
        gpus = self.machine.gpus
        free = gpus[0].free_bytes if gpus else self.machine.free_bytes
        return int(free * SHARE_OF_FREE)

    @property
    def share_bytes(self) -> int:
        """What one model may have: an equal part of those that may be loaded at a time."""
        num_models = len(self.specs) or self.several.models_max
        return self.budget_bytes // min(num_models, self.several.models_max)

    @property
    def rules(self) -> Rules:
        return Rules(
            self.budget_bytes,
            max_models=self.several.models_max,
            patience_s=self.several.load_patience_s,
        )

    def house_parts(self, readiness: Readiness, tracer: Tracer) -> HouseParts:
        try:
            shared = shared_parts(self.config, readiness, self.limits, self.catalog)
        except StateError as exc:
            raise SettingsError(f"--state-dir is {self.config.state_dir}: {exc}") from exc
        return HouseParts(
            limits=self.limits,
            digests=self.digests,
            shared=shared,
            tracer=tracer,
            machine=self.machine,
            share_bytes=self.share_bytes,
            budget_bytes=self.budget_bytes,
            starter=ThreadPoolExecutor(STARTERS, thread_name_prefix="starter"),
            templates=SpareTemplate(),
        )


class SeveralFront:
    """The front of several models, as `Front` is that of one."""

    def __init__(self, many: ManyModels, tracer: Tracer) -> None:
        self.readiness = Readiness()
        self.metrics = HouseMetrics()
        self.refused = self.metrics.refused
        self._many = many
        self._parts = many.house_parts(self.readiness, tracer)
        self.house = House(
            many.rules,
            self.metrics,
            lambda spec: HostedModel(spec, self._parts),
            self._new_spare,
        )
        for spec in many.specs:
            self.house.add(spec)
        # Nobody ends a server because one model has ended.
        self.lost: asyncio.Task[ExitStatus] = asyncio.ensure_future(_never())
        self._reading: asyncio.Task[None] | None = None

    @cached_property
    def app(self) -> ASGIApp:
        many = self._many
        plugins = many.settings.make(EngineConfig).plugins
        blank = blank_app(
            many.config,
            many.limits,
            self.readiness,
            self._parts.shared,
            plugins,
            has_keys=bool(many.digests.user or many.digests.admin),
        )
        roster = HouseRoster(
            self.house,
            self.readiness,
            blank,
            most_waiting=many.several.max_load_waiting,
            longest_wait_s=many.several.load_wait_s,
            takes_any_name=many.config.any_model_name,
            look=OfferWatch(many),
        )
        return with_edge(
            SeveralModels(roster, many.limits),
            blank.operations,
            many.config,
            many.limits,
            many.digests,
            self.metrics,
            self._parts.shared.refusals,
            self._parts.shared.batches,
        )

    async def wait_ready(self) -> Started:
        """Load the models that are loaded at the start, as far as they fit. Raises SettingsError if
        none of them can be."""
        fitting = await self._fitting()
        began_s = time.monotonic()
        results = await asyncio.gather(*map(self._load, fitting))
        reasons = [reason for reason in results if reason]
        if fitting and len(reasons) == len(fitting):
            raise SettingsError(reasons[0])
        garbage.freeze()  # of models, while nobody waits
        self.readiness.mark_ready()
        hosts = list(self.house.hosts.values())
        self._reading = asyncio.ensure_future(read_ahead(hosts, self._has_open))
        took_s = time.monotonic() - began_s
        loaded = [spec for spec, reason in zip(fitting, results, strict=True) if not reason]
        startup: list[tuple[str, str, float]] = []
        if loaded:
            num_bytes = self.house.facts.num_bytes
            startup.append(("loaded", f"{names_of(loaded)}: up to {size(num_bytes)}", took_s))
        return Started(startup)

    def _new_spare(self) -> EngineGroup:
        """Processes for the next load."""
        self._parts.starter.submit(self._parts.templates.make)
        return EngineGroup(1)

    def _has_open(self) -> bool:
        """Whether a request of any model is open."""
        return any(model.num_open for model in self.house.facts.models.values())

    async def _fitting(self) -> list[ModelSpec]:
        """The models that are loaded at the start and have room beside those before them."""
        found: list[ModelSpec] = []
        num_bytes = 0
        rules = self.house.facts.rules
        for spec in self._many.specs:
            if not spec.on_start or len(found) >= rules.max_models:
                continue
            try:
                await self.house.know(spec.name)
            except ApiError:
                found.append(spec)  # its load says why
                continue
            model = self.house.facts.models[spec.name]
            num_bytes += model.fixed_bytes + model.kv_bytes
            if num_bytes > rules.budget_bytes and found:
                log.info("not_loaded_yet", model=spec.name, reason="the memory of the others")
                num_bytes -= model.fixed_bytes + model.kv_bytes
                continue
            found.append(spec)
        return found

    async def _load(self, spec: ModelSpec) -> str:
        """Returns the reason why the model was not loaded; "" if it was."""
        try:
            await self.house.load(spec.name)
        except ApiError as exc:
            return exc.message
        return ""

    async def drain(
        self,
        timeout_s: float,
        *,
        abort: asyncio.Event | None = None,
        on_progress: Callable[[int, float], None] = lambda num_open, left_s: None,
    ) -> ExitStatus:
        """Like `Front.drain`, for all models at the same time."""
        self.readiness.drain()
        fronts = [host.front for host in self.house.hosts.values() if host.front is not None]
        drains = [asyncio.ensure_future(one.drain(timeout_s, abort=abort)) for one in fronts]
        deadline_s = time.monotonic() + timeout_s
        while drains and not all(one.done() for one in drains):
            num_open = sum(one.client.num_open for one in fronts)
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if num_open:
                on_progress(num_open, left_s)
            await asyncio.wait(drains, timeout=TICK_S)
        return ExitStatus(0)

    def close(self) -> None:
        self.lost.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self.house.close()
        self._parts.templates.stop()
        self.readiness.end()


async def _never() -> ExitStatus:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


class OfferWatch:
    """Reads the folder of models and the store again if they may have changed."""

    def __init__(self, many: ManyModels) -> None:
        self._many = many
        self._known: Sequence[ModelSpec] = ()
        self._state: tuple[object, ...] = ()
        self._read_s = 0.0  # when the store was read; its files lie in many folders

    def __call__(self) -> Sequence[ModelSpec]:
        several = self._many.several
        try:
            state: list[object] = [self._many.catalog.num_changes]
            folder = Path(several.models_dir).expanduser()
            if several.models_dir and folder.exists():
                state.append(folder.stat().st_mtime_ns)
            is_old = several.models_store and time.monotonic() > self._read_s + STORE_S
            if tuple(state) != self._state or is_old:
                self._known = offered_later(self._many.settings, self._many.store)
                self._state = tuple(state)
                self._read_s = time.monotonic()
        except (OSError, SettingsError) as exc:
            log.seldom("folder_not_read", reason=exc)
        return self._known


async def _run(
    many: ManyModels, console: Console, tracer: Tracer, listener: socket.socket
) -> ExitStatus:
    signals = LoopSignals()
    front = SeveralFront(many, tracer)
    garbage.freeze()
    try:
        return await supervise(front, many.config, many.limits, console, signals, listener)
    finally:
        front.close()


def serve_several(
    settings: Settings, config: ServerConfig, digests: KeyDigests, began: float
) -> int:
    """Run until stopped. Returns the exit status. Raises SettingsError and ModelError before
    anything is loaded."""
    try:
        with StartSignals(), ExitStack() as started:
            listener = started.enter_context(listen(config.host, config.port))
            logs.setup(config.log_level, format=config.log_format)
            many = ManyModels(settings, config, digests)
            console = Console(config, began, requires_key=bool(digests.user))
            if many.limits is not many.asked_limits:
                console.fewer_connections(
                    many.limits.max_connections, many.asked_limits.max_connections
                )
            tracer = make_tracer(config.otlp_endpoint, "several models")
            started.callback(tracer.close)
            console.several(names_of(many.specs), many.budget_bytes)
            end = run_loop(_run(many, console, tracer, listener))
    except Stopped:
        return 0
    console.ended(end.reason, end.status)
    return end.status
