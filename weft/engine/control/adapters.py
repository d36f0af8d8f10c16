"""Handlers of control requests about adapters. The reply comes when the device is done."""

from __future__ import annotations

from weft.engine.services import Services
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter


def load_lora_adapter(services: Services, message: LoadLoraAdapter) -> AdapterReply | None:
    return services.adapters.load(message)


def unload_lora_adapter(services: Services, message: UnloadLoraAdapter) -> AdapterReply | None:
    return services.adapters.unload(message)
