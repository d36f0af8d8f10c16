"""Adapters (LoRA) of --lora-dir, which are loaded when a request first names them."""

from __future__ import annotations

from typing import Any

from weft.client.adapters import AdapterRefused
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed


async def load_named(context: ServerContext, body: Any) -> None:
    """Load the adapters that a body names in `model` or `lora_path`, if they are offered and not
    loaded.

    Raises `ApiError` if one cannot be loaded. Unknown names are left to the code that looks them
    up.
    """
    for param in ("model", "lora_path"):
        value = getattr(body, param, None)
        names = value if isinstance(value, list) else [value]
        for name in dict.fromkeys(names):
            if name:
                await _load(context, param, name.removeprefix(f"{context.info.model_name}:"))


async def _load(context: ServerContext, param: str, name: str) -> None:
    try:
        await context.loader.load_offered(name)
    except AdapterRefused as exc:
        message = f"the adapter {name[:128]!r} cannot be loaded: {exc}"
        if exc.status == 409:  # all slots are in use now, but not forever
            raise failed(503, message) from exc
        raise ApiError(exc.status, message, param=param) from exc
