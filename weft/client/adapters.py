"""The names of adapters (LoRA): the content of each name, and the adapter that a request names.

The engine knows adapters by their content (`messages/adapters.py`); only this module knows names.
So when a name gets another content, this applies from the next request on. Several names may have
the same content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from weft.client.client import EngineClient
from weft.config.adapters import LoraPath, wrong_name
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter

DEFAULT_MODEL = "default"  # name of the served model in clients made for SGLang
TIMEOUT_S = 3_600.0  # time for the requests of an adapter to end
NO_ADAPTERS = "this server takes no adapters; start it with --enable-lora"


class AdapterRefused(Exception):
    """An adapter cannot be loaded, unloaded or used; the message is for the user."""

    def __init__(self, message: str, status: int = 400, *, of_files: bool = False) -> None:
        super().__init__(message)
        self.status = status  # HTTP status
        self.of_files = of_files  # whether its path or files are wrong, and not its name


class FoundAdapter(NamedTuple):
    """An adapter on disk that fits the model."""

    uid: str
    folder: str  # absolute
    rank: int


class AdapterFiles(Protocol):
    """The source of adapters."""

    offers: bool  # whether there are adapters that requests may load by name

    def find(self, path: str) -> FoundAdapter:
        """Check the adapter in a folder, and compute its uid. Takes as long as reading its files.
        Raises `AdapterRefused` if it cannot be used, or may not be read."""
        ...

    def offered(self, name: str) -> str:
        """The folder of the adapter that requests may use by this name before it is loaded; empty
        if there is none."""
        ...


class NamedAdapter(NamedTuple):
    """A loaded adapter."""

    name: str
    uid: str
    path: str  # as in the call to load it
    is_pinned: bool
    loaded_at: float  # Unix time


class AdapterNames:
    """The loaded adapters, by name."""

    def __init__(self, files: AdapterFiles | None = None, *names_of_model: str) -> None:
        """`files` None: the engine takes no adapters. `names_of_model`: the name of the served
        model and its aliases, which no adapter may have."""
        # "a:b:ADAPTER" is of the model "a:b", if there is one.
        self._names_of_model = sorted(names_of_model, key=len, reverse=True)
        self.by_name: dict[str, NamedAdapter] = {}
        # Whether requests may name adapters that are not loaded.
        self.offers = files is not None and files.offers
        self._files = files

    def uid_of(self, name: str) -> str:
        """The uid of a name. Raises `AdapterRefused`: 404 for an unknown name, 503 for an adapter
        that was loaded but was evicted before the request began."""
        found = self.by_name.get(name)
        if found is not None:
            return found.uid
        if self.offered(name):
            raise AdapterRefused(
                f"the adapter {name[:128]!r} was unloaded to make room for others; send the "
                "request again (--max-loaded-loras)",
                503,
            )
        raise AdapterRefused(self.unknown(name), 404)

    def offered(self, name: str) -> str:
        """The folder of an adapter that is loaded when a request names it; empty if it is loaded
        already, or does not exist."""
        if not self.offers or self._files is None or name in self.by_name:
            return ""
        if self._is_of_model(name):
            return ""
        return self._files.offered(name)

    def unknown(self, name: str) -> str:
        """The error message for an unknown name."""
        if self._files is None:
            return f"there is no adapter {name[:128]!r}: {NO_ADAPTERS}"
        loaded = ", ".join(map(repr, self.by_name)) or "none"
        return f"the adapter {name[:128]!r} does not exist; loaded are: {loaded}"

    def find(self, asked: LoraPath, *, replaces: bool = False) -> FoundAdapter:
        """The adapter to load under a name. Raises `AdapterRefused`."""
        if self._files is None:
            raise AdapterRefused(NO_ADAPTERS)
        why_not = wrong_name(asked.name)
        if why_not:
            raise AdapterRefused(why_not)
        if self._is_of_model(asked.name):
            raise AdapterRefused(
                f"an adapter cannot have the name {asked.name!r}: requests use this name for the "
                "served model, or for an adapter of it (MODEL:NAME)"
            )
        if asked.name in self.by_name and not replaces:
            raise AdapterRefused(
                f"the adapter {asked.name!r} is loaded already; unload it first, or replace it "
                "with load_inplace"
            )
        return self._files.find(asked.path)

    def loaded(self, asked: LoraPath, found: FoundAdapter, reply: AdapterReply) -> str:
        """Enter the engine's reply to a load. Returns a uid that no name has any more, if there is
        one. Raises `AdapterRefused` if the engine did not load the adapter."""
        self.forget(reply.evicted)
        if not reply.success:
            raise AdapterRefused(reply.message, reply.status)
        before = self.by_name.get(asked.name)
        self.by_name[asked.name] = NamedAdapter(
            asked.name, found.uid, asked.path, asked.pinned, time.time()
        )
        if before is None or self.is_named(before.uid):
            return ""
        return before.uid

    def remove(self, name: str) -> str:
        """Remove a name. Returns its uid if no other name has it, or "". Raises `AdapterRefused`
        404."""
        uid = self.uid_of(name)
        del self.by_name[name]
        return "" if self.is_named(uid) else uid

    def forget(self, uids: Iterable[str]) -> None:
        """Remove the names of adapters that are not loaded any more."""
        gone = set(uids)
        for name, adapter in list(self.by_name.items()):
            if adapter.uid in gone:
                del self.by_name[name]

    def of_model(self, name: str) -> str | None:
        """The name of the adapter in one of the form MODEL:ADAPTER; None for another form."""
        for model in self._names_of_model:
            if name.startswith(f"{model}:"):
                return name.removeprefix(f"{model}:")
        return None

    def _is_of_model(self, name: str) -> bool:
        """Whether this is a name of the model, or one of the form MODEL:ADAPTER."""
        if name == DEFAULT_MODEL or name in self._names_of_model:
            return True
        return self.of_model(name) is not None

    def is_named(self, uid: str) -> bool:
        """Whether a name belongs to this adapter."""
        return any(adapter.uid == uid for adapter in self.by_name.values())


class AdapterLoader:
    """Loads and unloads adapters by name, one after another. For one event loop."""

    def __init__(self, names: AdapterNames, client: EngineClient) -> None:
        self._names = names
        self._client = client
        self._lock = asyncio.Lock()
        self._unloading: set[asyncio.Task[Any]] = set()

    async def load(self, asked: LoraPath, *, replaces: bool = False) -> FoundAdapter:
        """Load an adapter under a name. Requests may use it when this returns.

        `replaces`: the name may belong to another adapter, which is unloaded after its requests
        have ended. Raises `AdapterRefused`.
        """
        async with self._lock:
            found = await asyncio.to_thread(self._names.find, asked, replaces=replaces)
            await self._put(asked, found)
            return found

    async def load_offered(self, name: str) -> None:
        """Load the adapter that a request names, if it is offered and not loaded. Other requests
        for it wait for the same load. Raises `AdapterRefused`."""
        if not self._names.offered(name):
            return
        async with self._lock:
            folder = self._names.offered(name)
            if folder:
                found = await asyncio.to_thread(self._names.find, LoraPath(name, folder))
                # Clients see the name of the folder, but not its location.
                await self._put(LoraPath(name, name), found)

    async def _put(self, asked: LoraPath, found: FoundAdapter) -> None:
        message = LoadLoraAdapter(
            lora_path=found.folder, uid=found.uid, lora_name=asked.name, pinned=asked.pinned
        )
        reply = await self._call(message)
        try:
            self._unload_later(self._names.loaded(asked, found, reply))
        except AdapterRefused:
            # Of several engines, some may have loaded it.
            if not self._names.is_named(found.uid):
                self._unload_later(found.uid)
            raise

    def _unload_later(self, uid: str) -> None:
        """Unload an adapter that nothing names, if there is one, without waiting for it."""
        if not uid:
            return
        task = asyncio.ensure_future(self._call(UnloadLoraAdapter(uid=uid)))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _call(self, message: LoadLoraAdapter | UnloadLoraAdapter) -> AdapterReply:
        return await self._client.call(message, TIMEOUT_S)

    async def unload(self, name: str) -> None:
        """Remove a name, and wait until the requests of its adapter have ended. Raises
        `AdapterRefused`."""
        async with self._lock:
            uid = self._names.remove(name)
        if not uid:
            return
        reply = await self._call(UnloadLoraAdapter(uid=uid))
        if not reply.success:
            raise AdapterRefused(reply.message, reply.status)
