"""Change how the engine runs while it runs: its settings, its pace, and what is logged."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.control import (
    ConfigureLogging,
    ConfigureLoggingReply,
    GetInternalState,
    GetInternalStateReply,
    SetInternalState,
    SetInternalStateReply,
    Setting,
    SlowDown,
    SlowDownReply,
)
from weft.observe.log import EventLog, set_level
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported

log = EventLog("control")


class SlowDownRequest(msgspec.Struct, kw_only=True):
    """Seconds that every step takes at least; null: as fast as it can."""

    forward_sleep_time: float | None


class StateRequest(msgspec.Struct, kw_only=True):
    """Settings and their new values: all of them, or none if one cannot be."""

    server_args: dict[str, Setting]


class LoggingRequest(msgspec.Struct, kw_only=True):
    """What is logged from now on; what is not given stays. Bodies of requests are never logged or dumped."""

    log_level: str | None = None
    log_requests: bool | None = None  # one line per finished request
    log_requests_level: int | None = None  # 0: no more than that line
    log_requests_format: str | None = None
    log_requests_target: list[str] | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    dump_requests_exclude_meta_keys: list[str] | None = None
    crash_dump_folder: str | None = None


NOT_OFFERED = (
    *(
        "log_requests_format",
        "log_requests_target",
        "dump_requests_folder",
        "dump_requests_threshold",
    ),
    *("dump_requests_exclude_meta_keys", "crash_dump_folder"),
)


async def slow_down(context: ServerContext, request: Request) -> ASGIApp:
    """Let every step take at least `forward_sleep_time` seconds, or with null no longer than it must."""
    body = await read_json(context, request, SlowDownRequest)
    step_s = body.forward_sleep_time
    reply = await context.client.call(
        lambda call: SlowDown(call=call, step_s=step_s or None), SlowDownReply
    )
    log.info("slow_down", step_s=step_s or 0.0, before_s=reply.before_s or 0.0)
    return json_response({"forward_sleep_time": step_s or None, "before": reply.before_s})


async def get_internal_state(context: ServerContext, request: Request) -> ASGIApp:
    """What `set_internal_state` can change, as it is now, and the engine's numbers."""
    reply = await context.client.call(
        lambda call: GetInternalState(call=call), GetInternalStateReply
    )
    return json_response(
        {
            "server_args": reply.settings,
            "state": reply.state,
            "stats": msgspec.to_builtins(reply.stats),
        }
    )


async def set_internal_state(context: ServerContext, request: Request) -> ASGIApp:
    """Change settings of the engine. 400, and nothing is changed, if one of them cannot be; it says what can."""
    asked = (await read_json(context, request, StateRequest)).server_args
    if not asked:
        raise ApiError(
            400, "server_args is empty; GET /get_internal_state tells what can be changed"
        )
    reply = await context.client.call(
        lambda call: SetInternalState(call=call, settings=asked), SetInternalStateReply
    )
    told = " ".join(f"{name}={value}" for name, value in asked.items())
    log.info("set_internal_state", success=reply.success, settings=told)
    if not reply.success:
        raise ApiError(400, reply.message, param=reply.name[:64])
    return json_response({"updated": True, "server_args": asked, "before": reply.before})


async def configure_logging(context: ServerContext, request: Request) -> ASGIApp:
    """Set the level of the log, in the engine and here, and whether finished requests are logged."""
    body = await read_json(context, request, LoggingRequest)
    for name in NOT_OFFERED:
        if getattr(body, name) is not None:
            raise not_supported(name)
    if body.log_requests_level:
        raise ApiError(
            400, "log_requests_level must be 0: bodies are never logged", param="log_requests_level"
        )
    level = body.log_level
    if level is not None:
        reply = await context.client.call(
            lambda call: ConfigureLogging(call=call, log_level=level), ConfigureLoggingReply
        )
        if not reply.success:
            raise ApiError(400, reply.message, param="log_level")
        set_level(level)
    if body.log_requests is not None:
        context.client.log_requests = body.log_requests
    log.info("configure_logging", log_level=level or "-", log_requests=context.client.log_requests)
    return json_response({"log_level": level, "log_requests": context.client.log_requests})
