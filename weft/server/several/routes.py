"""The routes that concern all models of a server: lists, loads, health, work, numbers.

They answer instead of the routes of one model with the same paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.engine_state import EngineUnavailable
from weft.client.explained import explained
from weft.json_types import JsonObject
from weft.messages.by_name import plain
from weft.messages.control import AbortRequest, ListRequests
from weft.observe.log import EventLog
from weft.server.admin.facts import METRICS_TYPE, OPEN_METRICS_TYPE, cards
from weft.server.admin.loads import (
    loads_answer,
    loads_asked,
    loads_of,
    refresh,
    shared_fullness,
)
from weft.server.admin.models import ModelBody, OfferedModel, OfferedModels, StatusOfModel
from weft.server.admin.work import (
    DEFAULT_LIMIT,
    explanation_fields,
    histories_response,
    refusal_fields,
)
from weft.server.aliases import AbortManyRequest
from weft.server.body import json_bytes, json_response, read_json
from weft.server.catalog import CatalogError, ModelCatalog
from weft.server.chat.agents import AgentFacts, agent_model
from weft.server.chat.answers import names_meant
from weft.server.chat.models import ModelCard
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.limits import require_accepting
from weft.server.ollama.library import remove_files, required_name
from weft.server.ollama.models import OllamaDeleteRequest, OllamaShowRequest
from weft.server.ollama.routes import details, facts_of, model_numbers, shown_from_catalog
from weft.server.several.asked import Asked
from weft.server.several.roster import ModelStatus, Roster

log = EventLog("admin")
IN_MEMORY = ("loaded", "sleeping", "growing", "shrinking")
FOR_EVER_S = 100 * 365 * 86_400.0  # as Ollama shows a model that stays
RosterHandler: TypeAlias = Callable[[Roster, Request], Awaitable[ASGIApp]]


class RosterRoute(NamedTuple):
    method: str
    path: str
    handler: RosterHandler


def _of(roster: Roster, name: str) -> ModelStatus:
    return next(one for one in roster.status() if one.name == name)


# ---- lists


async def list_models(roster: Roster, request: Request) -> ASGIApp:
    """All models: those that are not loaded are loaded by the first request for them."""
    require_accepting(roster.readiness)
    found: list[JsonObject] = []
    for_agents: list[JsonObject] = []
    for status in roster.status():
        own, agents = _cards_of(roster, status)
        found += own
        for_agents += agents
    answer = {
        "object": "list",
        "data": found,
        "models": for_agents,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": False,
    }
    return json_response(answer)


def _cards_of(roster: Roster, status: ModelStatus) -> tuple[list[JsonObject], list[JsonObject]]:
    """The entries of a model in `/v1/models`: for all clients, and for coding agents."""
    served = roster.served(status.name)
    if served is not None:
        listed, facts = cards(served.context)
    else:
        facts = AgentFacts(
            context_length=status.context_length,
            has_tools=False,
            has_reasoning=False,
            sees_images=False,
        )
        since = datetime.fromtimestamp(int(status.since_s), UTC)
        listed = [
            ModelCard(
                id=status.name,
                created=int(status.since_s),
                root=status.name,
                max_model_len=status.context_length,
                task=status.task,
                display_name=status.name,
                created_at=since.isoformat().replace("+00:00", "Z"),
            )
        ]
    value = _status_value(status)
    own = []
    for card in listed:
        aliases = list(status.aliases) if card.parent is None else []  # an adapter has none
        own.append(msgspec.to_builtins(card) | {"status": value, "aliases": aliases})
    agents = [agent_model(card.id, facts) for card in listed if card.task == "generate"]
    return own, agents


async def one_model(roster: Roster, request: Request) -> ASGIApp:
    require_accepting(roster.readiness)
    asked = request.path_params["id"]
    status = _of(roster, roster.find(asked))
    own, _ = _cards_of(roster, status)
    return json_response(next((card for card in own if card["id"] == asked), own[0]))


async def offered(roster: Roster, request: Request) -> ASGIApp:
    """The models with their states (llama-server)."""
    data = [_offered(status) for status in roster.status()]
    return json_response(OfferedModels(data=data))


def _offered(status: ModelStatus) -> OfferedModel:
    return OfferedModel(
        id=status.name,
        created=int(status.since_s),
        aliases=status.aliases,
        is_default=status.is_default,
        status=_status_value(status),
        pin=status.pin,
        ttl_s=status.ttl_s,
        expires_in_s=status.left_s,
        open_requests=status.num_open,
        waiting_requests=status.num_waiting,
        memory_bytes=status.num_bytes,
        full_bytes=status.full_bytes,
        kv_bytes=status.kv_bytes,
        size_bytes=status.facts.size_bytes,
        context_length=status.context_length,
    )


def _status_value(status: ModelStatus) -> StatusOfModel:
    found = StatusOfModel(value=status.state, failed=bool(status.reason), reason=status.reason)
    if status.delay is not None:
        found.position = status.delay.position
        found.eta_s = round(status.delay.eta_s, 2)
    return found


async def load_model(roster: Roster, request: Request) -> ASGIApp:
    body = await read_json(roster.blank.context, request, ModelBody)
    name = roster.find(body.model)
    log.info("load_model", model=name)
    await roster.load(name)
    return json_response({"success": True, "model": name})


async def unload_model(roster: Roster, request: Request) -> ASGIApp:
    body = await read_json(roster.blank.context, request, ModelBody)
    name = roster.find(body.model)
    log.info("unload_model", model=name)
    await roster.unload(name)
    return json_response({"success": True, "model": name})


# ---- Ollama


async def tags(roster: Roster, request: Request) -> ASGIApp:
    """All models. Of one that has not been loaded yet, what its files say."""
    return json_response({"models": await _tags(roster, roster.status())})


async def ps(roster: Roster, request: Request) -> ASGIApp:
    """The models in memory, and when they leave it."""
    shown = [one for one in roster.status() if one.state in IN_MEMORY]
    found: list[JsonObject] = []
    now = datetime.now(UTC)
    for status, tag in zip(shown, await _tags(roster, shown), strict=True):
        left_s = FOR_EVER_S if status.left_s is None else status.left_s
        leaves = now + timedelta(seconds=left_s)
        more = {
            "size": status.num_bytes,
            "size_vram": 0,
            "context_length": status.context_length,
            "expires_at": leaves.isoformat().replace("+00:00", "Z"),
        }
        found.append(tag | more)
    return json_response({"models": found})


async def _tags(roster: Roster, shown: Sequence[ModelStatus]) -> list[JsonObject]:
    catalog = roster.blank.context.catalog
    return await asyncio.to_thread(lambda: [_tag(status, catalog) for status in shown])


def _tag(status: ModelStatus, catalog: ModelCatalog | None) -> JsonObject:
    facts = status.facts
    digest = ""
    if catalog is not None and facts.folder:
        digest = catalog.digest(facts.folder)
    elif catalog is not None:
        with suppress(CatalogError):
            facts = facts_of(catalog.facts(status.name))
    return {
        "name": status.name,
        "model": status.name,
        "modified_at": _offered_since(status),
        "size": facts.size_bytes,
        "digest": digest,
        "details": details(facts),
    }


def _offered_since(status: ModelStatus) -> str:
    since = datetime.fromtimestamp(status.since_s, UTC)
    return since.isoformat().replace("+00:00", "Z")


async def delete(roster: Roster, request: Request) -> ASGIApp:
    """Remove a model from the machine; one that is in memory is unloaded first."""
    context = roster.blank.context
    body = await read_json(context, request, OllamaDeleteRequest)
    name = required_name(body.target, "model")
    log.info("delete_model", model=name)
    await roster.remove(name, partial(remove_files, context))
    return json_response({})


async def show(roster: Roster, request: Request) -> ASGIApp:
    """Facts about a model, which is not loaded for them; of one that is not offered, what its files
    say."""
    body = await read_json(roster.blank.context, request, OllamaShowRequest)
    try:
        status = _of(roster, roster.find(body.target or ""))
    except ApiError as exc:
        return json_response(await shown_from_catalog(roster.blank.context, str(body.target), exc))
    served = roster.served(status.name)
    capabilities = ["embedding" if status.task == "embed" else "completion"]
    template = ""
    if served is not None:
        context = served.context
        template = "\n".join(context.tokenizer.chat_templates.values())
        if context.media is not None and "image" in context.media.marks:
            capabilities.append("vision")
        if context.formats.tools is not None:
            capabilities.append("tools")
        if context.formats.reasoning is not None:
            capabilities.append("thinking")
    return json_response(
        {
            "details": details(status.facts),
            "model_info": model_numbers(status.facts, status.context_length, status.name),
            "template": template,
            "parameters": "",
            "modelfile": "",
            "capabilities": capabilities,
            "modified_at": _offered_since(status),
        }
    )


def unloaded_answer(path: str, asked: Asked) -> Response:
    """Ollama's answer to a request that only unloads a model."""
    empty: JsonObject = {"response": ""}
    if path == "/api/chat":
        empty = {"message": {"role": "assistant", "content": ""}}
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    fields = {"model": asked.model, "created_at": now, **empty}
    answer = json_bytes({**fields, "done": True, "done_reason": "unload"})
    if asked.stream is False:
        return Response(answer, media_type="application/json")
    return Response(answer + b"\n", media_type="application/x-ndjson")


# ---- health


async def health(roster: Roster, request: Request) -> ASGIApp:
    """503 while the server starts, and when the engine of a loaded model hangs."""
    if not (roster.readiness.accepting or roster.readiness.draining):
        require_accepting(roster.readiness)
    for served in roster.loaded().values():
        _ = served.context.client.engine
    return Response()


async def ready(roster: Roster, request: Request) -> ASGIApp:
    """Readiness: a model that is not loaded is loaded by its first request."""
    require_accepting(roster.readiness)
    return Response()


# ---- work


async def list_requests(roster: Roster, request: Request) -> ASGIApp:
    """The open requests of all models, and those that wait for their model to be loaded."""
    limit = int(query_number(request, "limit", DEFAULT_LIMIT))
    models: JsonObject = {}
    found: list[JsonObject] = []
    for name, served in roster.loaded().items():
        try:
            reply = plain(await served.context.client.call(ListRequests(limit)))
        except EngineUnavailable:
            continue
        models[name] = reply["queue"]
        found += [{**row, "model": name} for row in reply["requests"]]
    waiting = roster.waiting()
    found += [msgspec.to_builtins(one) for one in waiting]
    first: JsonObject = next(iter(models.values()), {})
    queue = {**first, "waiting_for_models": len(waiting)}
    return json_response({"queue": queue, "queues": models, "requests": found[:limit]})


async def explain(roster: Roster, request: Request) -> ASGIApp:
    """The histories of requests with this name, of all models, and of those that were refused; a
    request that waits for its model has its position and the expected time."""
    found: list[JsonObject] = []
    refused: list[JsonObject] = []
    for rid in names_meant(request.path_params["rid"]):
        of_name = await _explained(roster, rid)
        found += of_name.histories
        refused += of_name.refused
    return histories_response(request.path_params["rid"], found, refused)


class _OfName(NamedTuple):
    """What is remembered of a name."""

    histories: list[JsonObject]
    refused: list[JsonObject]


async def _explained(roster: Roster, rid: str) -> _OfName:
    found: list[JsonObject] = []
    is_in_engine = False
    for one in roster.waiting():
        if one.rid == rid:
            text = (
                f"waits for the model {one.model!r} to be loaded, for {one.waited_s:.1f} s so far; "
                f"{one.position} models before it, about {one.eta_s:.1f} s"
            )
            found.append({**msgspec.to_builtins(one), "text": [text]})
    for name, served in roster.loaded().items():
        try:
            explanations = await explained(served.context.client, rid)
        except EngineUnavailable:
            continue
        is_in_engine = is_in_engine or bool(explanations)
        found += [
            {**explanation_fields(served.context, explanation), "model": name}
            for explanation in explanations
        ]
    refusals = roster.blank.context.refusals
    return _OfName(found, refusal_fields(refusals, rid, is_in_engine=is_in_engine))


async def abort_request(roster: Roster, request: Request) -> ASGIApp:
    body = await read_json(roster.blank.context, request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid or abort_all", param="rid")
    aborted = _abort(roster, set() if body.abort_all else {body.rid or ""})
    log.info("abort_request", rid=body.rid or "*", aborted=aborted)
    return json_response({"aborted": aborted})


async def abort_requests(roster: Roster, request: Request) -> ASGIApp:
    body = await read_json(roster.blank.context, request, AbortManyRequest)
    names = set(body.request_ids or ())
    aborted = _abort(roster, names)
    log.info("abort_requests", names=len(names), aborted=aborted)
    return json_response({"aborted": aborted})


def _abort(roster: Roster, names: set[str]) -> int:
    """Abort the requests with these names that are open or wait for their models, or all if there
    are none. Returns their number."""
    aborted = roster.abort_waiting(names)
    for served in roster.loaded().values():
        client = served.context.client
        aborted += (
            sum(map(client.deliveries.abort, names)) if names else client.deliveries.abort_all()
        )
    return aborted


async def load(roster: Roster, request: Request) -> ASGIApp:
    num_open = sum(one.context.client.num_open for one in roster.loaded().values())
    return json_response({"server_load": num_open})


async def loads(roster: Roster, request: Request) -> ASGIApp:
    """An entry for each engine of each loaded model, the aggregate, and how full the server is."""
    version = roster.blank.context.info.version
    found = loads_asked(request, await _loads(roster))
    shares: list[tuple[list[JsonObject], float]] = []
    for name, served in roster.loaded().items():
        of_model = [one for one in found if one["model"] == name]
        shares.append((of_model, served.context.config.knee_output_per_s))
    return loads_answer(request, version, found, {"capacity": shared_fullness(shares)})


async def get_load(roster: Roster, request: Request) -> ASGIApp:
    short = [
        {
            "dp_rank": one["dp_rank"],
            "model": one["model"],
            "num_reqs": one["num_total_reqs"],
            "num_waiting_reqs": one["num_waiting_reqs"],
            "num_tokens": one["num_used_tokens"],
        }
        for one in await _loads(roster)
    ]
    return json_response(short)


async def _loads(roster: Roster) -> list[JsonObject]:
    names = list(roster.loaded())
    contexts = [roster.loaded()[name].context for name in names]
    answers: Any = await asyncio.gather(*map(loads_of, contexts), return_exceptions=True)
    found: list[JsonObject] = []
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, BaseException):
            found += [{**one, "model": name} for one in answer]
    return found


async def metrics(roster: Roster, request: Request) -> ASGIApp:
    """The numbers of all models on one page, each with its `model_name`."""
    contexts: list[ServerContext] = [one.context for one in roster.loaded().values()]
    await asyncio.gather(*map(refresh, contexts))
    is_open = "application/openmetrics-text" in request.headers.get("accept", "")
    page = roster.page(is_open=is_open)
    return Response(page, media_type=OPEN_METRICS_TYPE if is_open else METRICS_TYPE)


ROUTES = (
    RosterRoute("GET", "/v1/models", list_models),
    RosterRoute("GET", "/openai/v1/models", list_models),
    RosterRoute("GET", "/v1/models/{id:path}", one_model),
    RosterRoute("GET", "/models", offered),
    RosterRoute("POST", "/models/load", load_model),
    RosterRoute("POST", "/models/unload", unload_model),
    RosterRoute("GET", "/api/tags", tags),
    RosterRoute("GET", "/api/ps", ps),
    RosterRoute("POST", "/api/show", show),
    RosterRoute("DELETE", "/api/delete", delete),
    RosterRoute("GET", "/health", health),
    RosterRoute("GET", "/ping", health),
    RosterRoute("GET", "/ready", ready),
    RosterRoute("GET", "/requests", list_requests),
    RosterRoute("GET", "/requests/{rid:path}", explain),
    RosterRoute("POST", "/abort_request", abort_request),
    RosterRoute("POST", "/abort_requests", abort_requests),
    RosterRoute("GET", "/load", load),
    RosterRoute("GET", "/v1/loads", loads),
    RosterRoute("GET", "/get_load", get_load),
    RosterRoute("GET", "/metrics", metrics),
)
