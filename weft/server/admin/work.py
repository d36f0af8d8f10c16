"""Routes about the engine's work: its requests, queue, cache, and control requests by name.

Each handler reads a control request, sends it, and answers with the fields of the reply. If the
body of a route is a message of `weft.messages`, the engine gets this message.
"""

from __future__ import annotations

import gc

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from weft.client.calls import CALL_TIMEOUT_S
from weft.client.engine_state import EngineUnavailable
from weft.client.explained import explained
from weft.json_types import JsonObject
from weft.messages.by_name import BadCall, plain, request_named
from weft.messages.calls import SuccessReply
from weft.messages.control import (
    AbortRequest,
    AuditKv,
    BlockInput,
    ContinueGeneration,
    Explanation,
    FlushCache,
    FreezeGC,
    GenerationReply,
    InputReply,
    ListRequests,
    PauseGeneration,
    SetPolicy,
    UnblockInput,
)
from weft.observe import garbage
from weft.observe.log import EventLog
from weft.server.body import json_response, read_body, read_json
from weft.server.causes import cause_fields
from weft.server.chat.answers import names_meant
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.operation import get, post
from weft.server.refusals import RefusalLog

log = EventLog("admin")
DEFAULT_LIMIT = 1_000


class RpcRequest(msgspec.Struct, kw_only=True):
    """A control request by name; `list_methods` lists them."""

    method: str
    params: JsonObject | None = None


# ---- requests


async def list_requests(context: ServerContext, request: Request) -> ASGIApp:
    """The numbers of the queue, and at most `?limit` open requests.

    Running requests come first, then the queue in its order.
    """
    limit = int(query_number(request, "limit", DEFAULT_LIMIT))
    reply = await context.client.call(ListRequests(limit))
    return json_response(plain(reply))


async def explain_request(context: ServerContext, request: Request) -> ASGIApp:
    """The histories of the requests with exactly this name, or whose answer has it as its id,
    newest first, and of those that were refused.

    404 if no such request is remembered.
    """
    histories: list[JsonObject] = []
    refused: list[JsonObject] = []
    away: EngineUnavailable | None = None
    for rid in names_meant(request.path_params["rid"]):
        found: list[Explanation] = []
        try:
            found = await explained(context.client, rid)
        except EngineUnavailable as exc:
            away = exc
        histories += [explanation_fields(context, one) for one in found]
        refused += refusal_fields(context.refusals, rid, is_in_engine=bool(found))
    if away is not None and not refused:
        raise away
    return histories_response(request.path_params["rid"], histories, refused)


def histories_response(
    rid: str, histories: list[JsonObject], refused: list[JsonObject]
) -> Response:
    """The answer about a name. Raises `ApiError` if no request with it is remembered."""
    if not histories and not refused:
        message = f"no request named {rid[:128]!r} is open or among the last that ended"
        raise ApiError(404, message, param="rid")
    return json_response({"requests": histories, "refused": refused})


def refusal_fields(refusals: RefusalLog, rid: str, *, is_in_engine: bool) -> list[JsonObject]:
    """The refusals of requests with this name, the latest first. `is_in_engine`: an engine
    remembers some of this name."""
    found: list[JsonObject] = []
    for one in refusals.of(rid, is_in_engine=is_in_engine):
        fields = one._asdict()
        del fields["at_s"], fields["was_in_engine"]
        fields["ago_s"] = refusals.ago_s(one)
        fields["times"] = msgspec.to_builtins(one.times)
        found.append(fields)
    return found


def explanation_fields(context: ServerContext, one: Explanation) -> JsonObject:
    """An explanation, with its timeline and the tokens at which it left the cache also as text."""
    fields: JsonObject = msgspec.to_builtins(one)
    # Of use to engines and the front alone.
    for name in (
        *("namespace", "prompt"),
        *("arrived_s", "admitted_s", "explained_s", "busy_until_s", "busy_with"),
    ):
        del fields[name]
    if one.total_s is None:
        fields["total_s"] = one.stages.total_s
    fields["text"] = [str(entry) for entry in one.timeline]
    if one.cache_cause is not None:
        fields["cache_cause"] = cause_fields(context, one.cache_cause)
    return fields


async def abort_request(context: ServerContext, request: Request) -> ASGIApp:
    """Abort requests by `rid`, or all requests with `abort_all`.

    An unknown name is no error: the request may just have ended. The client aborts by its own table
    of names, because requests that exceed their tenant's share wait in the client.
    """
    body = await read_json(context, request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid or abort_all", param="rid")
    if body.abort_all:
        aborted = context.client.deliveries.abort_all()
    else:
        aborted = context.client.deliveries.abort(body.rid or "")
    log.info("abort_request", rid=body.rid or "*", aborted=aborted)
    return json_response({"aborted": aborted})


# ---- input and generation


async def block_input(context: ServerContext, request: Request) -> ASGIApp:
    """Hold back new requests. Running and waiting requests continue."""
    return _input("block", await context.client.call(BlockInput()))


async def unblock_input(context: ServerContext, request: Request) -> ASGIApp:
    """Accept requests again, starting with those that were held back; with `?ramp_s`, at a rate
    that grows for so many seconds."""
    ramp_s = await _ramp_s(context, request)
    return _input("unblock", await context.client.call(UnblockInput(ramp_s=ramp_s)))


async def _ramp_s(context: ServerContext, request: Request) -> float:
    """The ramp in the query. One in the body is refused: unread, it would open all at once."""
    limits = context.limits
    body = await read_body(request, int(limits.max_body_mb * 1_000_000), limits.body_timeout_s)
    if b'"ramp_s"' in body:
        message = f"ramp_s is in the body; it belongs to the query: {request.url.path}?ramp_s=120"
        raise ApiError(400, message, param="ramp_s")
    return query_number(request, "ramp_s", 0.0)


def _input(event: str, reply: InputReply) -> ASGIApp:
    log.info(event, state=reply.state, held_requests=reply.held_requests)
    return json_response(plain(reply))


async def pause_generation(context: ServerContext, request: Request) -> ASGIApp:
    """Run no more steps until /continue_generation.

    New requests wait; health checks are answered.
    """
    body = await read_json(context, request, PauseGeneration)
    return _generation("pause_generation", await context.client.call(body))


async def continue_generation(context: ServerContext, request: Request) -> ASGIApp:
    """Continue generation. Has no effect if generation is not paused. With `?ramp_s`, waiting
    requests are admitted at a rate that grows for so many seconds."""
    message = ContinueGeneration(ramp_s=await _ramp_s(context, request))
    return _generation("continue_generation", await context.client.call(message))


def _generation(event: str, reply: GenerationReply) -> ASGIApp:
    log.info(event, paused=reply.paused or "no", requests=reply.num_requests)
    answer = {
        "status": "ok",
        "paused": reply.paused or None,
        "open_requests": reply.num_requests,
    }
    return json_response(answer)


async def set_policy(context: ServerContext, request: Request) -> ASGIApp:
    """Order waiting requests by another policy; running requests are not affected.

    A 400 lists the valid policies.
    """
    body = await read_json(context, request, SetPolicy)
    reply = await context.client.call(body)
    log.info("set_policy", policy=body.policy, before=reply.before, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message, param="policy")
    return json_response({"policy": body.policy, "before": reply.before})


# ---- cache, audit, garbage collectors


async def flush_cache(context: ServerContext, request: Request) -> ASGIApp:
    """Empty the prefix cache; 400 if requests are still running after `?timeout` seconds. The text
    of the answer reports files that remain on disk."""
    timeout_s = query_number(request, "timeout", 0.0)
    reply = await context.client.call(FlushCache(timeout_s), timeout_s + CALL_TIMEOUT_S)
    log.info("flush_cache", rid=request.scope["weft.rid"], success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message or "the cache was not flushed: requests are running")
    lines = ["Cache flushed.", *reply.message.splitlines()]
    return PlainTextResponse("\n".join(lines) + "\n")


async def audit(context: ServerContext, request: Request) -> ASGIApp:
    """Audit the KV pages; `faults` is empty if every page has exactly one owner."""
    return json_response(plain(await context.client.call(AuditKv())))


async def freeze_gc(context: ServerContext, request: Request) -> ASGIApp:
    """Freeze the garbage collectors of the engine and of this process."""
    reply = await context.client.call(FreezeGC())
    garbage.freeze()
    here = gc.get_freeze_count()
    log.info("freeze_gc", frozen_objects=reply.frozen_objects, front_frozen_objects=here)
    return json_response({**plain(reply), "front_frozen_objects": here})


# ---- by name


async def rpc(context: ServerContext, request: Request) -> ASGIApp:
    """Send a control request by name, without the additional work of its own route.

    A 400 lists the valid names, or describes the wrong parameters.
    """
    body = await read_json(context, request, RpcRequest)
    try:
        called = request_named(body.method, body.params or {})
        msgspec.msgpack.encode(called)
    except BadCall as exc:
        raise ApiError(400, str(exc), param="method") from exc
    except (OverflowError, RecursionError) as exc:
        raise ApiError(400, f"params cannot be sent to the engine: {exc}", param="params") from exc
    reply = await context.client.call(called)
    success = not isinstance(reply, SuccessReply) or reply.success
    log.info("rpc", method=body.method, success=success)
    if not success:
        raise ApiError(400, reply.message, param="method")
    return json_response({"result": plain(reply)})


ROUTES = (
    get(
        "/requests",
        list_requests,
        "The queue and the open requests",
        query=("limit",),
        access="admin",
    ),
    get(
        "/requests/{rid:path}",
        explain_request,
        "What happened to a request, and why",
        access="admin",
    ),
    post("/abort_request", abort_request, "Abort requests", AbortRequest, access="admin"),
    post("/block", block_input, "Hold back new requests", access="admin"),
    post(
        "/unblock",
        unblock_input,
        "Admit the requests that were held back",
        query=("ramp_s",),
        access="admin",
    ),
    post("/pause_generation", pause_generation, "Run no step", PauseGeneration, access="admin"),
    post(
        "/continue_generation",
        continue_generation,
        "Continue after a pause",
        query=("ramp_s",),
        access="admin",
    ),
    post("/set_policy", set_policy, "Switch the policy", SetPolicy, access="admin"),
    post(
        "/flush_cache",
        flush_cache,
        "Empty the prefix cache",
        query=("timeout",),
        access="admin",
    ),
    post(
        "/reset_prefix_cache",
        flush_cache,
        "The same (vLLM)",
        query=("timeout",),
        access="admin",
    ),
    post("/audit", audit, "Check who owns each page of KV memory", access="admin"),
    post("/freeze_gc", freeze_gc, "Freeze the garbage collectors", access="admin"),
    post("/rpc", rpc, "Make a control request by name", RpcRequest, access="admin"),
)
