"""Changes of a running engine: its settings, its step time, its log, and profiles of the device."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.by_name import plain
from weft.messages.control import (
    ConfigureLogging,
    DumpExpertDistributionRecord,
    ExpertDistributionReply,
    ExpertRecordReply,
    GetExpertDistributionRecord,
    GetInternalState,
    SetInternalState,
    SlowDown,
    StartExpertDistributionRecord,
    StartProfile,
    StopExpertDistributionRecord,
    StopProfile,
)
from weft.observe.log import EventLog, set_level
from weft.server.body import has_body, json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import get, post

log = EventLog("control")
POLL_S = 0.1
PREPARING_TIMEOUT_S = 60.0  # for several engines to begin, on a busy machine
REPORT_TIMEOUT_S = 600.0  # for writing the report of many steps


class LoggingRequest(msgspec.Struct, kw_only=True):
    """New settings of the log; absent fields stay unchanged.

    Bodies of requests are never logged or dumped.
    """

    log_level: str | None = None
    log_requests: bool | None = None  # one line per finished request
    log_requests_level: int | None = None  # 0: only that line


# ---- pace and settings


async def slow_down(context: ServerContext, request: Request) -> ASGIApp:
    """Make every step take at least `forward_sleep_time` seconds; null: full speed."""
    body = await read_json(context, request, SlowDown)
    step_s = body.forward_sleep_time or None
    reply = await context.client.call(SlowDown(step_s))
    log.info("slow_down", step_s=step_s or 0.0, before_s=reply.before_s or 0.0)
    return json_response({"forward_sleep_time": step_s, "before": reply.before_s})


async def get_internal_state(context: ServerContext, request: Request) -> ASGIApp:
    """The current values of the settings that `set_internal_state` can change, and the engine's
    numbers."""
    return json_response(plain(await context.client.call(GetInternalState())))


async def set_internal_state(context: ServerContext, request: Request) -> ASGIApp:
    """Change settings of the engine. If one of them cannot be changed, the answer is a 400 and none
    is changed."""
    body = await read_json(context, request, SetInternalState)
    asked = body.server_args
    if not asked:
        message = (
            "server_args is empty; GET /get_internal_state lists the settings that can be changed"
        )
        raise ApiError(400, message)
    reply = await context.client.call(body)
    written = " ".join(f"{name}={value}" for name, value in asked.items())
    log.info("set_internal_state", success=reply.success, settings=written)
    if not reply.success:
        raise ApiError(400, reply.message, param=reply.name[:64])
    return json_response({"updated": True, "server_args": asked, "before": reply.before})


async def configure_logging(context: ServerContext, request: Request) -> ASGIApp:
    """Set the log level, in the engine and here, and whether requests are logged."""
    body = await read_json(context, request, LoggingRequest)
    level = body.log_level
    if level is not None:
        reply = await context.client.call(ConfigureLogging(level))
        if not reply.success:
            raise ApiError(400, reply.message, param="log_level")
        set_level(level)
    if body.log_requests is not None:
        context.client.deliveries.log_requests = body.log_requests
    log_requests = context.client.deliveries.log_requests
    log.info("configure_logging", log_level=level or "-", log_requests=log_requests)
    return json_response({"log_level": level, "log_requests": log_requests})


# ---- profiles


async def start_profile(context: ServerContext, request: Request) -> ASGIApp:
    """Start recording, and answer once recording has started. The first start takes about a second.

    Requests continue. 400 if the body asks for something that cannot be recorded, or the server
    cannot record.
    """
    body = StartProfile()
    if has_body(request):
        body = await read_json(context, request, StartProfile)
    while (reply := await context.client.call(body, PREPARING_TIMEOUT_S)).is_preparing:
        await asyncio.sleep(POLL_S)
    log.info(
        "start_profile",
        success=reply.success,
        trace=reply.trace or "-",
        message=reply.message or "-",
    )
    if not reply.success:
        raise ApiError(400, reply.message)
    answer = {"recording": True, "num_steps": body.num_steps, "trace": reply.trace or None}
    return json_response(answer)


async def stop_profile(context: ServerContext, request: Request) -> ASGIApp:
    """Stop recording, and answer with the report after it has been written, which takes seconds.

    400 if nothing was recorded.
    """
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while (reply := await context.client.call(StopProfile())).state == "writing":
        if time.monotonic() > deadline:
            raise ApiError(503, "the report of the profile is still being written; ask again")
        await asyncio.sleep(POLL_S)
    log.info("stop_profile", state=reply.state, num_steps=reply.num_steps, trace=reply.trace or "-")
    if reply.state == "none":
        raise ApiError(400, reply.message)
    if reply.state == "failed":
        raise ApiError(500, reply.message)
    answer = {
        "num_steps": reply.num_steps,
        "trace": reply.trace or None,
        "table": reply.table,
    }
    return json_response(answer)


# ---- experts


async def start_experts(context: ServerContext, request: Request) -> ASGIApp:
    """Count the tokens of each expert, from the next step on. 400 for a model without experts."""
    reply = await context.client.call(StartExpertDistributionRecord())
    return _experts("start_expert_distribution_record", reply)


async def stop_experts(context: ServerContext, request: Request) -> ASGIApp:
    """Stop counting. The counts can still be dumped. 400 if counting is off."""
    reply = await context.client.call(StopExpertDistributionRecord())
    return _experts("stop_expert_distribution_record", reply)


def _experts(event: str, reply: ExpertRecordReply) -> ASGIApp:
    log.info(event, success=reply.success, message=reply.message or "-")
    if not reply.success:
        raise ApiError(reply.status, reply.message)
    return json_response({"recording": event.startswith("start")})


async def get_experts(context: ServerContext, request: Request) -> ASGIApp:
    """The counts since the start or the last dump, without resetting them; `recording`: whether
    counting is on."""
    reply = await context.client.call(GetExpertDistributionRecord())
    return json_response({"recording": reply.is_recording, **_counts(reply)})


async def dump_experts(context: ServerContext, request: Request) -> ASGIApp:
    """The counts since the start or the last dump; resets them to zero."""
    reply = await context.client.call(DumpExpertDistributionRecord())
    log.info("dump_expert_distribution_record", success=reply.success, file=reply.file or "-")
    return json_response({**_counts(reply), "file": reply.file or None})


def _counts(reply: ExpertDistributionReply) -> dict[str, list[Any]]:
    if not reply.success:
        raise ApiError(reply.status, reply.message)
    return {"layers": reply.layers, "prefill": reply.prefill, "decode": reply.decode}


ROUTES = (
    post("/slow_down", slow_down, "Make steps take longer", SlowDown, access="admin"),
    get(
        "/get_internal_state",
        get_internal_state,
        "Settings that can be changed",
        access="admin",
    ),
    post(
        "/set_internal_state",
        set_internal_state,
        "Change settings while running",
        SetInternalState,
        access="admin",
    ),
    post(
        "/configure_logging",
        configure_logging,
        "Change what is logged",
        LoggingRequest,
        access="admin",
    ),
    post("/start_profile", start_profile, "Record the next steps", StartProfile, access="admin"),
    post(
        "/stop_profile",
        stop_profile,
        "Stop recording, for a table and a trace",
        access="admin",
    ),
    post(
        "/start_expert_distribution_record",
        start_experts,
        "Begin to count the tokens of each expert",
        access="admin",
    ),
    post(
        "/stop_expert_distribution_record",
        stop_experts,
        "Stop counting the tokens of experts",
        access="admin",
    ),
    get("/experts", get_experts, "The number of tokens of each expert so far", access="admin"),
    post(
        "/dump_expert_distribution_record",
        dump_experts,
        "The number of tokens of each expert, which then restarts from zero",
        access="admin",
    ),
)
