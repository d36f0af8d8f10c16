"""Facts: the model, the settings of server and engine, and the metrics.

This module changes nothing. No answer contains keys or paths of this machine.
"""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.adapters import NamedAdapter
from weft.config.generation import KINDS
from weft.json_types import JsonObject
from weft.messages.status import EngineReady
from weft.server.admin.loads import loads_of, refresh
from weft.server.body import json_response
from weft.server.chat.agents import AgentFacts, agent_model
from weft.server.chat.models import ModelCard, ModelList
from weft.server.context import ServerContext
from weft.server.limits import require_accepting
from weft.server.model_names import adapter_named, require_model
from weft.server.operation import get

METRICS_TYPE = "text/plain; version=0.0.4"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0"
HIDDEN_OF_ENGINE = (
    "generation_config",
    "journal",
    "profile_dir",
    "weights_root",
    "lora_paths",
    "lora_dir",
    "handoff_secret",
    "dist_secret",
)
HIDDEN_OF_SERVER = (
    "api_key",
    "api_key_file",
    "admin_api_key",
    "admin_api_key_file",
    "chat_template",
    "otlp_endpoint",
)


# ---- the model


async def models(context: ServerContext, request: Request) -> ASGIApp:
    """The models that accept requests now: none while the engine loads or the server drains."""
    _ = context.client.engine
    require_accepting(context.readiness)
    found, facts = cards(context)
    answer = ModelList(
        data=found,
        models=[agent_model(card.id, facts) for card in found if card.task == "generate"],
        first_id=found[0].id,
        last_id=found[-1].id,
    )
    return json_response(answer)


def cards(context: ServerContext) -> tuple[list[ModelCard], AgentFacts]:
    """The served model and its adapters, and what coding agents ask about them."""
    found = [_model(context), *map(partial(_adapter, context), context.adapters.by_name.values())]
    facts = AgentFacts(
        context_length=context.info.context_length,
        has_tools=context.template is not None and context.formats.tools is not None,
        has_reasoning=context.formats.reasoning is not None,
        sees_images=context.media is not None and "image" in context.media.marks,
    )
    return found, facts


async def model(context: ServerContext, request: Request) -> ASGIApp:
    """The served model or an adapter, by name."""
    _ = context.client.engine
    name = request.path_params["id"]
    require_model(context, name)
    adapter = adapter_named(context, name)
    if adapter is not None:
        return json_response(_adapter(context, adapter))
    return json_response(_model(context))


def _adapter(context: ServerContext, adapter: NamedAdapter) -> ModelCard:
    """`root`: the adapter's folder as requested; of an absolute path, only its last part."""
    path = Path(adapter.path)
    return msgspec.structs.replace(
        _card(context, adapter.name, adapter.loaded_at),
        root=path.name if path.is_absolute() else adapter.path,
        parent=context.info.model_name,
    )


def _model(context: ServerContext) -> ModelCard:
    return _card(context, context.info.model_name, context.info.started_at)


def _card(context: ServerContext, name: str, since: float) -> ModelCard:
    info = context.info
    created = int(since)
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return ModelCard(
        id=name,
        created=created,
        root=name,
        max_model_len=info.context_length,
        task=_task(context.client.state.ready),
        display_name=name,
        created_at=created_at,
    )


def _task(engine: EngineReady | None) -> str:
    if engine is None or engine.pools is None:
        return "generate"
    return engine.pools.task


async def model_info(context: ServerContext, request: Request) -> ASGIApp:
    """Facts about the model. Its path is the model name of the API."""
    engine = context.client.engine
    info = context.info
    kinds = () if context.media is None else context.media.marks
    answer = {
        "model_path": info.model_name,
        "model_summary": info.model_summary or engine.model_summary,
        "is_generation": engine.pools is None,
        "task": _task(engine),
        "context_length": info.context_length,
        "vocab_size": engine.vocab_size,
        "has_chat_template": context.template is not None,
        "has_image_understanding": "image" in kinds,
        "has_video_understanding": "video" in kinds,
        "has_audio_understanding": "audio" in kinds,
        "weight_version": context.client.state.weight_version,
    }
    return json_response(answer)


# ---- the server


async def server_info(context: ServerContext, request: Request) -> ASGIApp:
    """Settings and numbers."""
    client = context.client
    info = context.info
    engine = client.engine
    answer = {
        "version": info.version,
        "served_model_name": info.model_name,
        "model_path": info.model_name,
        "disable_radix_cache": not info.settings.get("prefix_cache", True),
        "uptime_s": round(time.time() - info.started_at, 3),
        "accepting": context.readiness.accepting,
        "weight_version": client.state.weight_version,
        "released": client.state.released,
        "context_length": info.context_length,
        "max_prompt_tokens": engine.max_prompt_tokens,
        "max_total_num_tokens": engine.kv_tokens,
        "page_size": engine.page_size,
        "sampling_defaults": {name: getattr(info.sampling, name) for name in KINDS},
        "startup": engine.startup,
        "passes": engine.passes,
        "open_completions": client.num_open,
        "server": _without(dataclasses.asdict(context.config), HIDDEN_OF_SERVER),
        "limits": dataclasses.asdict(context.limits),
        "engine": _without(dict(info.settings), HIDDEN_OF_ENGINE),
        "internal_states": await loads_of(context),
    }
    return json_response(answer)


def _without(settings: JsonObject, hidden: tuple[str, ...]) -> JsonObject:
    for name in hidden:
        settings.pop(name, None)
    return settings


async def metrics(context: ServerContext, request: Request) -> ASGIApp:
    """The metrics for Prometheus. Only the OpenMetrics format supports exemplars."""
    await refresh(context)
    found = context.client.metrics
    if "application/openmetrics-text" in request.headers.get("accept", ""):
        return Response(found.render_open(), media_type=OPEN_METRICS_TYPE)
    return Response(found.render(), media_type=METRICS_TYPE)


ROUTES = (
    get("/v1/models", models, "The models that are served, and adapters", answer=ModelList),
    get("/v1/models/{id:path}", model, "One model", answer=ModelCard),
    get("/metrics", metrics, "Metrics for Prometheus", access="metrics"),
    get("/model_info", model_info, "Facts about the model"),
    get("/get_model_info", model_info, "Facts about the model"),
    get("/server_info", server_info, "Settings and state"),
    get("/get_server_info", server_info, "Settings and state"),
)
