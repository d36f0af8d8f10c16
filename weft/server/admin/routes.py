"""Administration and information: flush the cache, abort, freeze the collector; what is served, with which settings."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from weft.config.generation import KINDS
from weft.observe import garbage
from weft.observe.log import EventLog
from weft.server.admin.loads import load_of, refresh
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.openai.models import ModelCard, ModelList

log = EventLog("admin")
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
PATHS = (
    "generation_config",
    "journal",
    "profile_dir",
    "weights_root",
)  # settings that are not told


class AbortRequest(msgspec.Struct, kw_only=True):
    """Abort requests by their exact name, or all of them."""

    rid: str | None = None
    abort_all: bool | None = None


async def flush_cache(context: ServerContext, request: Request) -> ASGIApp:
    """Empty the prefix cache; 400 if requests are still running after `?timeout` seconds."""
    reply = await context.client.flush_cache(query_number(request, "timeout", 0.0))
    log.info("flush_cache", rid=request.scope["weft.rid"], success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message or "the cache was not flushed: requests are running")
    return PlainTextResponse("Cache flushed.\n")


async def abort_request(context: ServerContext, request: Request) -> ASGIApp:
    """Abort by `rid`, or everything with `abort_all`. An unknown name is no error: the request has just ended."""
    body = await read_json(context, request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid or abort_all", param="rid")
    aborted = context.client.abort_all() if body.abort_all else context.client.abort(body.rid or "")
    log.info("abort_request", rid=body.rid or "*", aborted=aborted)
    return json_response({"aborted": aborted})


async def freeze_gc(context: ServerContext, request: Request) -> ASGIApp:
    """Freeze the garbage collectors of the engine and of this process."""
    engine, here = await context.client.freeze_gc(), garbage.freeze()
    log.info("freeze_gc", frozen_objects=engine, front_frozen_objects=here)
    return json_response({"frozen_objects": engine, "front_frozen_objects": here})


async def models(context: ServerContext, request: Request) -> ASGIApp:
    """What can be asked now: nothing, while the engine loads."""
    _ = context.client.engine
    found = _model(context)
    return json_response(ModelList(data=[found], first_id=found.id, last_id=found.id))


async def model(context: ServerContext, request: Request) -> ASGIApp:
    _ = context.client.engine
    context.require_model(request.path_params["id"])
    return json_response(_model(context))


def _model(context: ServerContext) -> ModelCard:
    info, ready = context.info, context.client.ready
    task = "generate" if ready is None or ready.pools is None else ready.pools.task
    name = info.model_name
    return ModelCard(
        id=name,
        created=int(info.started_at),
        root=name,
        max_model_len=info.context_length,
        task=task,
        display_name=name,
        created_at=datetime.fromtimestamp(int(info.started_at), UTC)
        .isoformat()
        .replace("+00:00", "Z"),
    )


async def model_info(context: ServerContext, request: Request) -> ASGIApp:
    engine = context.client.engine
    return json_response(
        {
            "model_path": context.info.model_name,  # the name that clients use, not a path of this machine
            "model_summary": context.info.model_summary or engine.model_summary,
            "is_generation": engine.pools is None,
            "task": "generate" if engine.pools is None else engine.pools.task,
            "context_length": context.info.context_length,
            "vocab_size": engine.vocab_size,
            "has_chat_template": context.template is not None,
            "weight_version": context.client.weight_version,
        }
    )


async def server_info(context: ServerContext, request: Request) -> ASGIApp:
    """Settings and numbers. Keys and paths are left out."""
    engine = context.client.engine
    hidden = {
        "api_key",
        "api_key_file",
        "admin_api_key",
        "admin_api_key_file",
        "chat_template",
        "otlp_endpoint",
    }
    server = {
        key: value for key, value in dataclasses.asdict(context.config).items() if key not in hidden
    }
    return json_response(
        {
            "version": context.info.version,
            "served_model_name": context.info.model_name,
            "model_path": context.info.model_name,  # the name that clients use, not a path of this machine
            "disable_radix_cache": not context.info.settings.get("prefix_cache", True),
            "uptime_s": round(time.time() - context.info.started_at, 3),
            "accepting": context.readiness.accepting,
            "weight_version": context.client.weight_version,
            "released": context.client.released,
            "context_length": context.info.context_length,
            "max_prompt_tokens": engine.max_prompt_tokens,
            "max_total_num_tokens": engine.kv_tokens,
            "page_size": engine.page_size,
            "sampling_defaults": {name: getattr(context.info.sampling, name) for name in KINDS},
            "startup": engine.startup,
            "open_completions": context.client.num_open,
            "server": server,
            "limits": dataclasses.asdict(context.limits),
            "engine": {
                key: value for key, value in context.info.settings.items() if key not in PATHS
            },
            "internal_states": [await load_of(context)],
        }
    )


async def metrics(context: ServerContext, request: Request) -> ASGIApp:
    await refresh(context)
    if "application/openmetrics-text" in request.headers.get(
        "accept", ""
    ):  # only there exemplars have a place
        return Response(context.client.metrics.render_open(), media_type=OPEN_METRICS)
    return Response(context.client.metrics.render(), media_type="text/plain; version=0.0.4")
