"""Routes that load and unload adapters (LoRA) of a running server, with the bodies and answers of
SGLang and of vLLM."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from weft.client.adapters import AdapterRefused
from weft.config.adapters import LoraPath
from weft.observe.log import EventLog
from weft.server.body import json_bytes, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, error_json
from weft.server.operation import post

log = EventLog("adapters")


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """Load an adapter from a folder below --weights-root."""

    lora_name: str
    lora_path: str
    pinned: bool = False  # keeps its slot: never evicted
    load_inplace: bool = False  # may replace a loaded adapter of this name


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """Unload an adapter after its open requests have ended; new requests are refused at once."""

    lora_name: str


# ---- SGLang's


async def load_lora_adapter(context: ServerContext, request: Request) -> ASGIApp:
    """On any error, the answer is a 400 with the reason, and nothing has changed."""
    body = await read_json(context, request, LoadAdapterBody)
    try:
        await _load(context, body)
    except AdapterRefused as exc:
        return _outcome(context, exc)
    return _outcome(context)


async def unload_lora_adapter(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, UnloadAdapterBody)
    try:
        await _unload(context, body)
    except AdapterRefused as exc:
        return _outcome(context, exc)
    return _outcome(context)


def _outcome(context: ServerContext, refused: AdapterRefused | None = None) -> ASGIApp:
    """SGLang's fields, and the error in the form of all routes."""
    loaded = {name: adapter.path for name, adapter in context.adapters.by_name.items()}
    answer: dict[str, object] = {"success": True, "error_message": "", "loaded_adapters": loaded}
    if refused is None:
        return Response(json_bytes(answer), media_type="application/json")
    answer |= {"success": False, "error_message": str(refused)}
    error = _error(refused)
    error.status = 400
    answer |= msgspec.json.decode(error_json(error))
    return Response(json_bytes(answer), error.status, media_type="application/json")


# ---- vLLM's


async def load_adapter_v1(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, LoadAdapterBody)
    try:
        await _load(context, body)
    except AdapterRefused as exc:
        raise _error(exc) from exc
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter_v1(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, UnloadAdapterBody)
    try:
        await _unload(context, body)
    except AdapterRefused as exc:
        raise _error(exc) from exc
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _error(exc: AdapterRefused) -> ApiError:
    return ApiError(exc.status, str(exc), param="lora_path" if exc.of_files else "lora_name")


# ---- inside


async def _load(context: ServerContext, body: LoadAdapterBody) -> None:
    asked = LoraPath(body.lora_name, body.lora_path, body.pinned)
    found = await context.loader.load(asked, replaces=body.load_inplace)
    log.info("loaded", name=body.lora_name, uid=found.uid, rank=found.rank)


async def _unload(context: ServerContext, body: UnloadAdapterBody) -> None:
    await context.loader.unload(body.lora_name)
    log.info("unloaded", name=body.lora_name)


_LOAD = "Load an adapter (LoRA)"
_UNLOAD = "Unload an adapter"
ROUTES = (
    post("/load_lora_adapter", load_lora_adapter, _LOAD, LoadAdapterBody, access="admin"),
    post("/unload_lora_adapter", unload_lora_adapter, _UNLOAD, UnloadAdapterBody, access="admin"),
    post(
        "/v1/load_lora_adapter",
        load_adapter_v1,
        f"{_LOAD} (vLLM)",
        LoadAdapterBody,
        access="admin",
    ),
    post(
        "/v1/unload_lora_adapter",
        unload_adapter_v1,
        f"{_UNLOAD} (vLLM)",
        UnloadAdapterBody,
        access="admin",
    ),
)
