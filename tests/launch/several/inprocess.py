"""A server with several models in one process and one event loop: the house, its application, and
hosts whose engines are fakes. A model answers with its own name, letter by letter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import httpx
from starlette.types import ASGIApp

from tests.server.fake import READY, FakeEngine, as_bytes, byte_tokenizer
from tests.server.template_here import rendering_here
from weft.batches.service import BatchService
from weft.client.adapters import AdapterNames
from weft.client.client import EngineClient
from weft.config.engine import EngineConfig
from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.launch.several.hosted import HostedBytes, LoadFailed
from weft.launch.several.house import House
from weft.launch.several.roster import HouseRoster
from weft.launch.several.specs import ModelSpec
from weft.launch.watch import ExitStatus
from weft.observe.metrics import Metrics
from weft.observe.several import HouseMetrics
from weft.residency.rules import Rules
from weft.server.app import ModelApp, SharedParts, model_app, shared_parts, with_edge
from weft.server.catalog import ModelCatalog
from weft.server.context import ModelFacts, Readiness, ServerInfo
from weft.server.helpers import start_helpers
from weft.server.several.app import SeveralModels

CONTEXT = 200
CONFIG = ServerConfig()
LIMITS = Limits()


class FakeParts(NamedTuple):
    metrics: Metrics


class FakeFront:
    """A front with a fake engine."""

    def __init__(self, spec: ModelSpec, shared: SharedParts, metrics: Metrics) -> None:
        tokenizer = byte_tokenizer()
        self.readiness = Readiness()
        self.engine = FakeEngine(deliver=lambda message: self.client.deliver(message))
        self.engine.script = lambda ids: as_bytes(spec.name * 20)
        self.client = EngineClient(
            tokenizer, lambda message: self.engine.send(message), metrics=metrics
        )
        self.client.deliver(READY)
        self.readiness.mark_ready()
        self.adapters = AdapterNames()
        self.lost: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        info = ServerInfo(
            model_name=spec.name,
            aliases=spec.aliases,
            context_length=CONTEXT,
            version="0.1.0",
            started_at=time.time(),
            settings={"dtype": "auto"},
        )
        with rendering_here():
            self.served: ModelApp = model_app(
                self.client,
                tokenizer,
                CONFIG,
                info,
                self.readiness,
                LIMITS,
                None,
                start_helpers(tokenizer, CONFIG, LIMITS, None),
                "",
                shared=shared,
                has_keys=False,
            )

    def kill(self) -> None:
        self.engine.running.clear()
        self.client.engine_lost("the engine was killed")
        self.lost.set_result(ExitStatus(1, "the engine was killed"))


class FakeHost:
    """A host whose loads take `load_s`, and its state for checks."""

    def __init__(self, spec: ModelSpec, shared: SharedParts) -> None:
        self.spec = spec
        self.size = HostedBytes(60, 20)
        self.can_shrink = True
        self.prepared = None
        self.facts = ModelFacts()
        self.front: FakeFront | None = None
        self.parts = FakeParts(Metrics(spec.name))
        self.load_s = 0.01
        self.num_crashes = 0  # loads whose process is killed
        self.fault = ""  # of the model; its loads fail
        self.error: Exception | None = None  # a fault of weft in each load
        self.gate: asyncio.Event | None = None  # a load waits for it
        self.early_gate: asyncio.Event | None = None  # the files are read when it is set
        self.num_loads = 0
        self.changes: list[str] = []
        self.adapter_names: set[str] = set()
        self.offered_adapters: set[str] = set()
        self._shared = shared

    def offers_adapter(self, name: str) -> bool:
        return name in self.offered_adapters

    async def prepare(self) -> None:
        await asyncio.sleep(0)
        if self.early_gate is not None:
            await self.early_gate.wait()

    def forget(self) -> None:
        """Its files are read again."""

    async def load(self, group: object = None) -> None:
        self.num_loads += 1
        await asyncio.sleep(self.load_s)
        if self.gate is not None:
            await self.gate.wait()
        if self.num_crashes:
            self.num_crashes -= 1
            raise LoadFailed("its process was killed", is_users=False)
        if self.error is not None:
            raise self.error
        if self.fault:
            raise LoadFailed(self.fault, is_users=True)
        self.front = FakeFront(self.spec, self._shared, self.parts.metrics)

    async def lost(self) -> ExitStatus:
        assert self.front is not None
        return await asyncio.shield(self.front.lost)

    async def unload(self) -> None:
        self.changes.append("unload")
        await asyncio.sleep(0.001)
        await self.close()

    async def shrink(self) -> None:
        self.changes.append("shrink")
        await asyncio.sleep(0.001)

    async def grow(self) -> None:
        self.changes.append("grow")
        await asyncio.sleep(0.001)

    async def close(self) -> None:
        if self.front is not None:
            self.front.client.close("the model is unloaded")
            self.front.readiness.end()
        self.front = None

    def stop(self) -> None:
        self.front = None


class Server:
    """The application, its house, and a client for it."""

    def __init__(
        self, app: ASGIApp, house: House, roster: HouseRoster, batches: BatchService
    ) -> None:
        self.app = app
        self.batches = batches
        self.house = house
        self.roster = roster
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60
        )

    def host(self, name: str) -> FakeHost:
        host: Any = self.house.hosts[name]
        assert isinstance(host, FakeHost)
        return host

    def front(self, name: str) -> FakeFront:
        front = self.host(name).front
        assert front is not None, f"{name} is not loaded"
        return front

    async def complete(self, model: str, max_tokens: int = 3, **fields: object) -> httpx.Response:
        body = {"model": model, "prompt": "x", "max_tokens": max_tokens, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def until(self, check: Any) -> None:
        async with asyncio.timeout(20):
            while not check():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    *specs: ModelSpec,
    rules: Rules | None = None,
    most_waiting: int = 100,
    wait_s: float = 20.0,
    catalog: ModelCatalog | None = None,
    look: Callable[[], Sequence[ModelSpec]] | None = None,
) -> AsyncIterator[Server]:
    """`look`: which models of the folder there are now; None: those of `specs`."""
    readiness = Readiness()
    shared = shared_parts(CONFIG, readiness, LIMITS, catalog)
    metrics = HouseMetrics()

    def new_host(spec: ModelSpec) -> Any:
        return FakeHost(spec, shared)

    house = House(rules or Rules(100), metrics, new_host, lambda: None)
    for one in specs:
        house.add(one)
    tokenizer = byte_tokenizer()
    info = ServerInfo(model_name="none", context_length=0, version="0.1.0", started_at=0.0)
    with rendering_here():
        blank = model_app(
            EngineClient(tokenizer, lambda message: None),
            tokenizer,
            ServerConfig(any_model_name=True),
            info,
            readiness,
            LIMITS,
            None,
            start_helpers(tokenizer, CONFIG, LIMITS, None),
            "",
            shared=shared,
            has_keys=False,
        )
    new: Sequence[ModelSpec] = [one for one in specs if one.in_folder]
    roster = HouseRoster(
        house,
        readiness,
        blank,
        most_waiting=most_waiting,
        longest_wait_s=wait_s,
        takes_any_name=False,
        look=look or (lambda: new),
    )
    app = with_edge(
        SeveralModels(roster, LIMITS),
        blank.operations,
        CONFIG,
        LIMITS,
        KeyDigests(),
        metrics,
        shared.refusals,
        shared.batches,
    )
    readiness.mark_ready()
    server = Server(app, house, roster, shared.batches)
    try:
        yield server
    finally:
        await server.http.aclose()
        house.close()
        readiness.end()


def spec(name: str, **facts: Any) -> ModelSpec:
    return ModelSpec(name, EngineConfig(), ServerConfig(), **facts)
