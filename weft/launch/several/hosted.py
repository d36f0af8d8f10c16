"""One model of a server with several: its engine processes and its front, while it is loaded.

It does not decide when: `house.py` does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from weft.assemble.prepare import Prepared, prepare
from weft.config.adapters import LoraPath, parse_lora_paths
from weft.config.amounts import size
from weft.config.keys import KeyDigests, share_sessions
from weft.config.limits import Limits
from weft.config.lockstep import with_engines
from weft.config.machine import Machine
from weft.config.model import ModelError
from weft.config.options import SettingsError, TooLarge
from weft.config.parallel import num_ranks
from weft.executor.lora.folders import AdapterFolders
from weft.launch.context import LaunchContext
from weft.launch.engine_group import EngineGroup, part_of
from weft.launch.engine_process import SocketFolder
from weft.launch.front import EngineLost, Front, FrontParts, front_helpers, load_parts
from weft.launch.model_facts import model_facts
from weft.launch.several.spare import SpareTemplate
from weft.launch.several.specs import ModelSpec, file_name
from weft.launch.watch import ExitStatus
from weft.messages.weights import ReleaseMemoryOccupation, ResumeMemoryOccupation
from weft.observe.log import EventLog
from weft.observe.trace import Tracer
from weft.server.app import SharedParts
from weft.server.context import ModelFacts

STOP_S = 2.0  # time for an engine to end by itself
SAVE_S = 10.0  # time for an engine to write its cache before it is unloaded
KV_TIMEOUT_S = 60.0  # for taking and giving back the memory of KV
KV = ["kv_cache"]

log = EventLog("models")


class LoadFailed(Exception):
    """A model cannot be loaded; the message is for the user."""

    def __init__(self, reason: str, *, is_users: bool) -> None:
        """`is_users`: the model or its settings are wrong."""
        super().__init__(reason)
        self.is_users = is_users


class HostedBytes(NamedTuple):
    """Memory of a loaded model."""

    fixed_bytes: int  # weights, and the work of its engines
    kv_bytes: int


@dataclass(frozen=True, kw_only=True)
class HouseParts:
    """What all models of a server use."""

    limits: Limits
    digests: KeyDigests
    shared: SharedParts
    tracer: Tracer
    machine: Machine
    share_bytes: int  # memory that one model may have if all that may be loaded are
    budget_bytes: int
    # Its threads live as long as the server: processes end with the thread that starts them.
    starter: Executor
    templates: SpareTemplate


class HostedModel:
    """The processes of one model. All methods are called from one event loop."""

    def __init__(self, spec: ModelSpec, house: HouseParts) -> None:
        """Raises SettingsError for adapters that are named wrongly."""
        self.spec = spec
        self.prepared: Prepared | None = None
        self.facts = ModelFacts()
        self.front: Front | None = None
        self.parts: FrontParts | None = None  # stay when the model is unloaded
        self._house = house
        self._group: EngineGroup | None = None
        self._sockets: SocketFolder | None = None
        self._adapters: list[LoraPath] = []  # that were loaded when it was unloaded
        self._on_load = parse_lora_paths(spec.engine.lora_paths)
        self._folders = AdapterFolders("", Path(), directory=spec.engine.lora_dir)
        self._lock = asyncio.Lock()
        self._names: frozenset[str] = frozenset()  # of the model's files when it was prepared

    @property
    def size(self) -> HostedBytes:
        """Raises AssertionError before `prepare`."""
        assert self.prepared is not None, "its size is not known"
        sizing = self.prepared.sizing
        num_engines = max(self.spec.server.dp_size, 1)
        fixed = sizing.weight_bytes + sizing.work_bytes
        return HostedBytes(fixed * num_engines, sizing.kv_bytes * num_engines)

    @property
    def adapter_names(self) -> Collection[str]:
        """The loaded adapters; of a model that is not in memory, those that its load brings."""
        if self.front is not None:
            return self.front.adapters.by_name.keys()
        return {one.name for one in (*self._on_load, *self._adapters)}

    def offers_adapter(self, name: str) -> bool:
        """Whether a request with this name loads an adapter from the model's folder of adapters."""
        return bool(self._folders.offered(name))

    @property
    def can_shrink(self) -> bool:
        """Whether its engines can give the memory of KV back, and take it again."""
        assert self.prepared is not None
        config = self.prepared.config
        return config.device == "cpu" and num_ranks(config) == 1 and self.spec.server.dp_size == 1

    async def prepare(self) -> None:
        """Check the model's files, unless they are those that were checked, and fit it to its share
        of the memory. Raises `LoadFailed`."""
        async with self._lock:
            if self.prepared is not None:
                if self.front is not None:
                    return
                if self._names == await asyncio.to_thread(_names_in, self.prepared.folder):
                    return
                self.parts = None
            try:
                self.prepared = await asyncio.to_thread(self._prepare)
                self._names = await asyncio.to_thread(_names_in, self.prepared.folder)
                self.facts = await asyncio.to_thread(model_facts, self.prepared)
            except TooLarge as exc:
                limit = f"All models together may take --memory, {size(self._house.budget_bytes)}."
                raise LoadFailed(f"{exc} {limit}", is_users=True) from exc
            except (ModelError, SettingsError, OSError) as exc:
                raise LoadFailed(str(exc), is_users=True) from exc

    def _prepare(self) -> Prepared:
        """A model that does not fit into its share gets what is left by no other."""
        house = self._house
        num_engines = self.spec.server.dp_size
        engine = share_sessions(with_engines(self.spec.engine, num_engines), house.digests)
        try:
            small = replace(house.machine, free_bytes=house.share_bytes)
            return prepare(engine, part_of(small, num_engines, engine), self.spec.own)
        except SettingsError:
            if house.share_bytes >= house.budget_bytes:
                raise
        alone = replace(house.machine, free_bytes=house.budget_bytes)
        return prepare(engine, part_of(alone, num_engines, engine), self.spec.own)

    def forget(self) -> None:
        """Read the model's files again before the next load: they may have changed."""
        if self.front is None and self._group is None:
            self.prepared = None
            self.parts = None

    async def load(self, group: EngineGroup | None = None) -> None:
        """Start the engines, and wait until they are ready. `group`: a process that has been
        started already. Raises `LoadFailed`; then nothing is left of it."""
        spec = self.spec
        # Here and not in a thread: a process ends with the thread that has started it.
        self._group = group or EngineGroup(spec.server.dp_size)
        try:
            await self.prepare()  # files may have come and gone since
            self._sockets = SocketFolder()
            context = self._context()
            self._group.begin(context, self._sockets)
            front = await self._make_front(context, self._group)
            self.front = await front.__aenter__()
            await front.wait_ready()
            await front.load_adapters(self._adapters)
        except EngineLost as exc:
            await self.close()
            raise LoadFailed(exc.end.reason, is_users=exc.end.status == 2) from exc
        except (ModelError, SettingsError, OSError) as exc:
            await self.close()
            raise LoadFailed(str(exc), is_users=True) from exc
        except BaseException:
            await self.close()
            raise

    async def _make_front(self, context: LaunchContext, group: EngineGroup) -> Front:
        parts = await self.read_parts()
        # Elsewhere, because the streams of other models would wait for these processes.
        loop = asyncio.get_running_loop()
        house = self._house
        helpers = await loop.run_in_executor(
            house.starter, front_helpers, context, parts, house.templates.take
        )
        try:
            return Front(
                context,
                group,
                self._house.tracer,
                parts=parts,
                shared=replace(self._house.shared, model_name=self.spec.name),
                helpers=helpers,
            )
        except BaseException:
            helpers.close()
            raise

    async def read_parts(self) -> FrontParts:
        """Read what the front needs of the model, unless it has been read. Reading a tokenizer of
        50,000 tokens keeps the front for a tenth of a second. Raises ModelError and
        SettingsError, and AssertionError before `prepare`."""
        async with self._lock:
            if self.parts is None:
                self.parts = await asyncio.to_thread(self._read_parts, self._context())
            return self.parts

    def _read_parts(self, context: LaunchContext) -> FrontParts:
        parts = load_parts(context)
        # Another program may remove the model: without its template it would not chat.
        if _names_in(context.prepared.folder) != self._names:
            raise SettingsError("files of the model came or went while it was read")
        return parts

    def _context(self) -> LaunchContext:
        assert self.prepared is not None
        prepared = self.prepared
        journal = prepared.config.journal
        if journal:
            own = _own_journal(Path(journal), self.spec.name)
            prepared = prepared._replace(config=replace(prepared.config, journal=own))
        return LaunchContext(
            prepared=prepared,
            config=self.spec.server,
            limits=self._house.limits,
            digests=self._house.digests,
            aliases=self.spec.aliases,
        )

    async def lost(self) -> ExitStatus:
        """Wait until no engine is left. Its open requests have been answered by then."""
        assert self.front is not None
        return await asyncio.shield(self.front.lost)

    async def unload(self) -> None:
        """Write the cache to disk, if there is a folder for it, and end the engines."""
        front = self.front
        if front is not None and not front.lost.done():
            await front.save_cache(SAVE_S)
            named = front.adapters.by_name.values()
            self._adapters = [LoraPath(one.name, one.path, one.is_pinned) for one in named]
        await self.close()

    async def shrink(self) -> None:
        """Write the cache to disk, and give the memory of KV back. Raises `LoadFailed`."""
        front = self.front
        assert front is not None
        await front.save_cache(SAVE_S)
        reply = await front.client.call(ReleaseMemoryOccupation(tags=KV), KV_TIMEOUT_S)
        if not reply.success:
            raise LoadFailed(reply.message, is_users=False)

    async def grow(self) -> None:
        """Take the memory of KV again. Raises `LoadFailed`."""
        assert self.front is not None
        reply = await self.front.client.call(ResumeMemoryOccupation(tags=KV), KV_TIMEOUT_S)
        if not reply.success:
            raise LoadFailed(reply.message, is_users=False)

    async def close(self) -> None:
        """End the engines, whatever they are doing, and close the front."""
        front, group, sockets = self.front, self._group, self._sockets
        self.front = self._group = self._sockets = None
        if front is not None:
            front.client.close("the model is unloaded")
            await front.__aexit__(None, None, None)
        if self.parts is not None:
            self.parts.tokenizer.workers.rest()
        if group is not None:
            await asyncio.to_thread(group.stop, STOP_S)
        if sockets is not None:
            sockets.__exit__(None, None, None)

    def stop(self) -> None:
        """`close`, without an event loop that goes on."""
        if self._group is not None:
            self._group.stop(STOP_S)
        if self._sockets is not None:
            self._sockets.__exit__(None, None, None)


def _names_in(folder: Path) -> frozenset[str]:
    """Names in a model's folder; empty if it is not there."""
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def _own_journal(folder: Path, name: str) -> str:
    """The journal file of a load of a model: FOLDER/NAME/NUMBER, with a new number each time."""
    own = folder / file_name(name)
    try:
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise SettingsError(f"--journal: {own} cannot be made: {exc.strerror}") from exc
    numbers = [int(file.name) for file in own.iterdir() if file.name.isdecimal()]
    return str(own / f"{max(numbers, default=0) + 1:06}")
