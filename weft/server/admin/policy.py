"""Switch the scheduler's policy while it runs."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError

log = EventLog("policy")


class PolicyRequest(msgspec.Struct, kw_only=True):
    """The policy to order waiting requests by from now on."""

    policy: str


async def set_policy(context: ServerContext, request: Request) -> ASGIApp:
    """Order waiting requests by another policy; nothing that runs is touched. 400 names the policies there are."""
    body = await read_json(context, request, PolicyRequest)
    reply = await context.client.set_policy(body.policy)
    log.info("set_policy", policy=body.policy, before=reply.before, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message, param="policy")
    return json_response({"policy": body.policy, "before": reply.before})
