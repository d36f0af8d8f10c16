"""What the front tells engines when adapters are loaded under names."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from weft.client.adapters import AdapterLoader, AdapterNames, AdapterRefused, FoundAdapter
from weft.client.client import EngineClient
from weft.config.adapters import LoraPath
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter


class Files:
    offers = False

    def find(self, path: str) -> FoundAdapter:
        return FoundAdapter(uid=path, folder=f"/{path}", rank=1)

    def offered(self, name: str) -> str:
        return ""


class Engines:
    """Loads what is not called "full", and notes what it was asked for."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    async def call(self, message: Any, timeout_s: float) -> AdapterReply:
        if isinstance(message, UnloadLoraAdapter):
            self.unloaded.append(message.uid)
            return AdapterReply(success=True)
        assert isinstance(message, LoadLoraAdapter)
        if message.lora_name == "full":
            return AdapterReply(success=False, message="all are in use", status=409)
        return AdapterReply(success=True)


def test_an_adapter_that_some_engines_could_not_load_is_unloaded_unless_a_name_uses_it() -> None:
    engines = Engines()
    loader = AdapterLoader(AdapterNames(Files()), cast(EngineClient, engines))

    async def run() -> None:
        await loader.load(LoraPath("a", "one", pinned=False))
        for path in ("one", "two"):
            with pytest.raises(AdapterRefused, match="all are in use"):
                await loader.load(LoraPath("full", path, pinned=False))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert engines.unloaded == ["two"]
