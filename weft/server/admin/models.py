"""Routes about the models of a server, as llama-server has them.

Here the server has one model, which is loaded as long as the server runs; `server/several/` answers
the same paths for several.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.model_names import require_model
from weft.server.operation import get, post


class StatusOfModel(msgspec.Struct, kw_only=True):
    # unloaded, loading, loaded, shrinking, sleeping (without KV), growing, unloading or failed
    value: str
    failed: bool = False
    reason: str = ""  # why its last load failed
    position: int | None = None  # models that are loaded before it, if requests wait for it
    eta_s: float | None = None


class OfferedModel(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    owned_by: str = "weft"
    created: int
    aliases: tuple[str, ...] = ()
    is_default: bool = True  # whether requests that name no model get it
    in_cache: bool = True
    status: StatusOfModel
    pin: bool = False
    ttl_s: float = 0.0
    expires_in_s: float | None = None  # until it is unloaded, if nobody asks; None: it stays
    open_requests: int = 0
    waiting_requests: int = 0
    memory_bytes: int = 0  # now, at most
    full_bytes: int = 0  # when it is loaded; 0: not known yet
    kv_bytes: int = 0
    size_bytes: int = 0  # of its files
    context_length: int = 0


class OfferedModels(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[OfferedModel]


class ModelBody(msgspec.Struct, kw_only=True):
    model: str


async def models(context: ServerContext, request: Request) -> ASGIApp:
    """The served model, and its state."""
    info = context.info
    state = "loading" if context.client.state.ready is None else "loaded"
    one = OfferedModel(
        id=info.model_name,
        created=int(info.started_at),
        status=StatusOfModel(value=state),
        pin=True,
        open_requests=context.client.num_open,
        size_bytes=info.model.size_bytes,
        context_length=info.context_length,
    )
    return json_response(OfferedModels(data=[one]))


async def load(context: ServerContext, request: Request) -> ASGIApp:
    """Nothing is left to do: the served model is loaded."""
    body = await read_json(context, request, ModelBody)
    require_model(context, body.model)
    _ = context.client.engine
    return json_response({"success": True, "model": context.info.model_name})


async def unload(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ModelBody)
    require_model(context, body.model)
    message = (
        "this server has one model, which is loaded as long as the server runs; weft serve with "
        "several models, or --models-dir, loads and unloads"
    )
    raise ApiError(400, message, param="model")


ROUTES = (
    get("/models", models, "The models with their states (llama-server)", answer=OfferedModels),
    post("/models/load", load, "Load a model (llama-server)", ModelBody, access="admin"),
    post("/models/unload", unload, "Unload a model (llama-server)", ModelBody, access="admin"),
)
