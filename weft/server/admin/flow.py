"""The flow of work, from outside: block and unblock the input, pause and continue generation, call a method by name."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.messages.flow import (
    Block,
    ContinueGeneration,
    GenerationReply,
    InputReply,
    PauseGeneration,
    PauseMode,
    Rpc,
    RpcReply,
    Unblock,
)
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError

log = EventLog("flow")
_MODES = {str(mode): mode for mode in get_args(PauseMode)}


class PauseRequest(msgspec.Struct, kw_only=True):
    """What becomes of open requests: abort ends them, retract takes those that run back to the queue, in_place leaves
    them as they are."""

    mode: str = "abort"


class RpcRequest(msgspec.Struct, kw_only=True):
    """A method of the engine, by name; `list_methods` lists them."""

    method: str
    params: dict[str, Any] | None = None


async def block(context: ServerContext, request: Request) -> ASGIApp:
    """Hold back requests that come from now on. What runs or waits goes on; blocking twice is blocking once."""
    return _input("block", await context.client.call(lambda call: Block(call=call), InputReply))


async def unblock(context: ServerContext, request: Request) -> ASGIApp:
    """Let requests in again, what was held back first."""
    return _input("unblock", await context.client.call(lambda call: Unblock(call=call), InputReply))


def _input(event: str, reply: InputReply) -> Response:
    log.info(event, state=reply.state, held_requests=reply.held_requests)
    return json_response({"state": reply.state, "held_requests": reply.held_requests})


async def pause_generation(context: ServerContext, request: Request) -> ASGIApp:
    """Run no further step until /continue_generation. New requests wait; health checks are answered."""
    body = await read_json(context, request, PauseRequest)
    if body.mode not in _MODES:
        raise ApiError(
            400, f"mode is {body.mode[:64]!r}; one of {', '.join(_MODES)} is expected", param="mode"
        )
    mode = _MODES[body.mode]
    reply = await context.client.call(
        lambda call: PauseGeneration(call=call, mode=mode), GenerationReply
    )
    return _generation("pause_generation", reply)


async def continue_generation(context: ServerContext, request: Request) -> ASGIApp:
    """Go on. Does nothing if generation is not paused."""
    reply = await context.client.call(lambda call: ContinueGeneration(call=call), GenerationReply)
    return _generation("continue_generation", reply)


def _generation(event: str, reply: GenerationReply) -> Response:
    log.info(event, paused=reply.paused or "no", requests=reply.num_requests)
    return json_response(
        {"status": "ok", "paused": reply.paused or None, "open_requests": reply.num_requests}
    )


async def rpc(context: ServerContext, request: Request) -> ASGIApp:
    """Call a method of the engine; 400 names those there are, or what is wrong with the parameters."""
    body = await read_json(context, request, RpcRequest)
    params = body.params or {}
    try:
        msgspec.msgpack.encode(params)
    except (OverflowError, RecursionError) as exc:
        raise ApiError(400, f"params cannot be sent to the engine: {exc}", param="params") from exc
    reply = await context.client.call(
        lambda call: Rpc(call=call, method=body.method, params=params), RpcReply
    )
    log.info("rpc", method=body.method, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message, param="method")
    return json_response({"result": reply.result})
