"""Routes from outside of weft: those of control requests, and those that modules bring as they are.

A handler that raises, or calls `sys.exit`, is the answer 500 to its own request, as with any route.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import AsyncContentStream, StreamingResponse
from starlette.types import ASGIApp

from weft.config.plugins import plugins, refused
from weft.messages.outside import CallOutside, OutsideControl
from weft.observe.log import EventLog
from weft.observe.survivable import survived
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.operation import Handler, Operation, post

log = EventLog("admin")


def outside_operations(
    setting: str,
    known: Sequence[Operation],
) -> tuple[Operation, ...]:
    """The routes that `--plugins` adds to those that are known. Raises SettingsError."""
    found: list[Operation] = []
    for name, control in outside_controls(setting):
        _add(found, known, control_route(name, control), f"control={name}")
    for name, own in plugins(setting, "routes"):
        several = own if isinstance(own, list | tuple) else (own,)
        for one in several:
            if not isinstance(one, Operation):
                raise refused("routes", name, "is no weft.server.operation.Operation")
            _add(found, known, one, f"routes={name}")
    return tuple(replace(one, handler=_fenced(one.handler)) for one in found)


def outside_controls(setting: str) -> Iterator[tuple[str, OutsideControl]]:
    """The control requests of `--plugins`, by name. Raises SettingsError."""
    for name, own in plugins(setting, "control"):
        if not isinstance(own, OutsideControl):
            raise refused("control", name, "is no weft.messages.outside.OutsideControl")
        yield name, own


def _fenced(handler: Handler) -> Handler:
    """A handler whose stream cannot end the server: Starlette sends a stream from a task of its
    own, and `sys.exit` in a task ends the event loop."""

    async def call(context: ServerContext, request: Request) -> ASGIApp:
        answer = await handler(context, request)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _pieces(answer.body_iterator)
        return answer

    return call


async def _pieces(body: AsyncContentStream) -> AsyncIterator[Any]:
    try:
        async for piece in body:
            yield piece
    except BaseException as exc:
        raise survived(exc) from None


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
    known: Sequence[Operation],
    one: Operation,
    plugin: str,
) -> None:
    """Raises SettingsError for a route that could be taken for another one.

    A path has one access, whatever its method, so no path of weft's own may be used again.
    """
    kind, _, name = plugin.partition("=")
    route = f"{one.method} {one.path}"
    for other in (*known, *found):
        if not _have_common_paths(one.path, other.path):
            continue
        if other in known or (other.method, other.path) == (one.method, one.path):
            there = f"{other.method} {other.path}"
            raise refused(kind, name, f"has the route {route}, whose path is that of {there}")
        if other.access != one.access:
            ways = f"{one.access!r}, and {other.path} {other.access!r}"
            raise refused(kind, name, f"has the route {route} with the access {ways}")
    found.append(one)


def _have_common_paths(one: str, other: str) -> bool:
    """Whether a path may belong to both templates. The part behind a `{` can be anything, as for
    the table of accesses."""
    ours, our_brace, _ = one.partition("{")
    theirs, their_brace, _ = other.partition("{")
    if our_brace and their_brace:
        return ours.startswith(theirs) or theirs.startswith(ours)
    if our_brace:
        return theirs.startswith(ours)
    if their_brace:
        return ours.startswith(theirs)
    return ours == theirs
