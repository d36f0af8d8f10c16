"""The profiler of the engine's device: start it, and stop it for a table and a trace."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.control import StartProfile, StartProfileReply, StopProfile, StopProfileReply
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported

log = EventLog("profile")
POLL_S = 0.1
REPORT_TIMEOUT_S = 600.0  # for the report of many steps to be written


class ProfileRequest(msgspec.Struct, kw_only=True):
    """What is recorded of the next steps."""

    num_steps: int | None = (
        None  # then it stops by itself; not given: at /stop_profile, or at the profiler's limit
    )
    activities: list[str] | None = None  # CPU, GPU; not given: all that the device has
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    output_dir: str | None = None  # for the trace, below --profile-dir
    profile_prefix: str | None = None  # of its name
    start_step: int | None = None
    profile_by_stage: bool | None = None
    profile_stages: list[str] | None = None
    merge_profiles: bool | None = None


async def start_profile(context: ServerContext, request: Request) -> ASGIApp:
    """Begin to record, and answer when that is so, the first time after a second; requests go on. 400 for what cannot
    be recorded, or not there."""
    body = (
        await read_json(context, request, ProfileRequest)
        if _has_body(request)
        else ProfileRequest()
    )
    for name in ("start_step", "profile_by_stage", "profile_stages", "merge_profiles"):
        if getattr(body, name):
            raise not_supported(name)
    num_steps = body.num_steps

    def asked(call: int) -> StartProfile:
        return StartProfile(
            call=call,
            num_steps=num_steps,
            activities=body.activities or [],
            record_shapes=body.record_shapes,
            with_stack=body.with_stack,
            profile_memory=body.profile_memory,
            folder=body.output_dir or "",
            prefix=body.profile_prefix or "",
        )

    while (reply := await context.client.call(asked, StartProfileReply)).is_preparing:
        await asyncio.sleep(POLL_S)
    log.info(
        "start_profile",
        success=reply.success,
        trace=reply.trace or "-",
        message=reply.message or "-",
    )
    if not reply.success:
        raise ApiError(400, reply.message)
    return json_response({"recording": True, "num_steps": num_steps, "trace": reply.trace or None})


async def stop_profile(context: ServerContext, request: Request) -> ASGIApp:
    """Stop, and answer with the report as soon as it is written, which takes seconds. 400 if nothing was recorded."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while (
        reply := await context.client.call(lambda call: StopProfile(call=call), StopProfileReply)
    ).state == "writing":
        if time.monotonic() > deadline:
            raise ApiError(503, "the report of the profile is still being written; ask again")
        await asyncio.sleep(POLL_S)
    log.info("stop_profile", state=reply.state, num_steps=reply.num_steps, trace=reply.trace or "-")
    if reply.state == "none":
        raise ApiError(400, reply.message)
    if reply.state == "failed":
        raise ApiError(500, reply.message)
    return json_response(
        {"num_steps": reply.num_steps, "trace": reply.trace or None, "table": reply.table}
    )


def _has_body(request: Request) -> bool:
    return (
        request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    )
