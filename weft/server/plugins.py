"""Routes from outside of weft: those of control requests, and those that modules bring as they are.

A handler that raises is the answer 500 to its own request, as with any route.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.config.plugins import plugins, refused
from weft.messages.outside import CallOutside, OutsideControl
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import Operation, post

log = EventLog("admin")


def outside_operations(
    setting: str,
    known: Sequence[Operation],
) -> tuple[Operation, ...]:
    """The routes that `--plugins` adds to those that are known. Raises SettingsError."""
    found: list[Operation] = []
    taken = {(one.method, one.path) for one in known}
    for name, own in plugins(setting, "control"):
        if not isinstance(own, OutsideControl):
            raise refused("control", name, "is no weft.messages.outside.OutsideControl")
        _add(found, taken, control_route(name, own), f"control={name}")
    for name, own in plugins(setting, "routes"):
        several = own if isinstance(own, list | tuple) else (own,)
        for one in several:
            if not isinstance(one, Operation):
                raise refused("routes", name, "is no weft.server.operation.Operation")
            _add(found, taken, one, f"routes={name}")
    return tuple(found)


def control_route(
    name: str,
    own: OutsideControl,
) -> Operation:
    """The route of a control request: its body is the message, its answer the reply."""

    async def call(
        context: ServerContext,
        request: Request,
    ) -> ASGIApp:
        body = await read_json(context, request, own.message)
        asked = CallOutside(name=name, body=msgspec.msgpack.encode(body))
        reply = await context.client.call(asked)
        log.info("outside", name=name, success=not reply.wrong)
        if reply.wrong:
            raise ApiError(400, reply.wrong)
        return json_response(msgspec.msgpack.decode(reply.body))

    return post(own.route, call, own.summary, own.message, access="admin")


def _add(
    found: list[Operation],
    taken: set[tuple[str, str]],
    one: Operation,
    plugin: str,
) -> None:
    if (one.method, one.path) in taken:
        kind, _, name = plugin.partition("=")
        raise refused(kind, name, f"has the route {one.method} {one.path}, which is there already")
    taken.add((one.method, one.path))
    found.append(one)
