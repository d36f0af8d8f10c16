"""Administration and information: flush the cache, abort, freeze the collector; what is served, with which settings."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from weft.observe.log import EventLog
from weft.server.body import json_bytes, read_json
from weft.server.errors import ApiError
from weft.server.info import Front
from weft.server.limits import SCRAPE_TIMEOUT_S
from weft.server.openai.models import Model, ModelList
from weft.text.client import EngineUnavailable

log = EventLog("admin")
MAX_FLUSH_TIMEOUT_S = 600.0


class AbortRequest(msgspec.Struct, kw_only=True):
    """Abort requests by their exact name, or all of them."""

    rid: str | None = None
    abort_all: bool | None = None


async def flush_cache(front: Front, request: Request) -> ASGIApp:
    """Empty the prefix cache; 400 if requests are still running after `?timeout` seconds."""
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise ApiError(400, f"timeout must be 0 to {MAX_FLUSH_TIMEOUT_S:g} seconds", param="timeout")
    reply = await front.client.flush_cache(timeout_s)
    log.info("flush_cache", rid=request.scope["weft.rid"], success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message or "the cache was not flushed: requests are running")
    return PlainTextResponse("Cache flushed.\n")


async def abort_request(front: Front, request: Request) -> ASGIApp:
    """Abort by `rid`, or everything with `abort_all`. An unknown name is no error: the request has just ended."""
    body = await read_json(front, request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid or abort_all", param="rid")
    aborted = front.client.abort_all() if body.abort_all else front.client.abort(body.rid or "")
    log.info("abort_request", rid=body.rid or "*", aborted=aborted)
    return _json({"aborted": aborted})


async def freeze_gc(front: Front, request: Request) -> ASGIApp:
    frozen = await front.client.freeze_gc()
    log.info("freeze_gc", rid=request.scope["weft.rid"], frozen_objects=frozen)
    return _json({"frozen_objects": frozen})


async def models(front: Front, request: Request) -> ASGIApp:
    return _json(ModelList(data=[_model(front)]))


async def model(front: Front, request: Request) -> ASGIApp:
    front.require_model(request.path_params["id"])
    return _json(_model(front))


def _model(front: Front) -> Model:
    info = front.info
    created = int(info.started_at)
    return Model(id=info.model_name, created=created, root=info.model_name, max_model_len=info.context_length)


async def model_info(front: Front, request: Request) -> ASGIApp:
    engine = front.client.engine
    return _json(
        {
            "model_path": front.info.model_name,  # the name that clients use, not a path of this machine
            "model_summary": front.info.model_summary or engine.model_summary,
            "is_generation": True,
            "context_length": front.info.context_length,
            "vocab_size": engine.vocab_size,
            "has_chat_template": front.template is not None,
        }
    )


async def server_info(front: Front, request: Request) -> ASGIApp:
    """Settings and numbers. Keys and paths are left out."""
    engine = front.client.engine
    hidden = {"api_key", "admin_api_key", "chat_template"}
    server = {key: value for key, value in dataclasses.asdict(front.config).items() if key not in hidden}
    return _json(
        {
            "version": front.info.version,
            "served_model_name": front.info.model_name,
            "uptime_s": round(time.time() - front.info.started_at, 3),
            "accepting": front.readiness.accepting,
            "context_length": front.info.context_length,
            "max_prompt_tokens": engine.max_prompt_tokens,
            "max_total_num_tokens": engine.kv_tokens,
            "page_size": engine.page_size,
            "startup": engine.startup,
            "server": server,
            "engine": {key: value for key, value in front.info.settings.items() if key != "journal"},
            "internal_states": [await _load(front)],
        }
    )


async def loads(front: Front, request: Request) -> ASGIApp:
    """How busy the engine is, for routers."""
    return _json({"timestamp": time.time(), "version": front.info.version, "loads": [await _load(front)]})


async def metrics(front: Front, request: Request) -> ASGIApp:
    await _refresh(front)
    return Response(front.client.metrics.render(), media_type="text/plain; version=0.0.4")


async def _load(front: Front) -> dict[str, Any]:
    await _refresh(front)
    stats, gauges = front.client.stats, front.client.metrics.engine
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": stats.kv_used,
        "max_total_num_tokens": stats.kv_tokens,
        "token_usage": round(gauges.token_usage, 4),
        "cache_hit_rate": round(gauges.cache_hit_rate, 4),
        "gen_throughput": round(gauges.gen_throughput, 2),
        "last_gen_throughput": round(gauges.gen_throughput, 2),
        "stats": msgspec.to_builtins(stats),
    }


async def _refresh(front: Front) -> None:
    """Fresh numbers if the engine has them at once; else the last it sent."""
    try:
        await front.client.get_state(SCRAPE_TIMEOUT_S)
    except EngineUnavailable:
        log.debug("no_fresh_stats")


def _json(answer: Any) -> Response:
    return Response(json_bytes(answer), media_type="application/json")
