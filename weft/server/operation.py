"""A route of the server: an entry of the table `ROUTES` in the module that answers it.

`/openapi.json`, `/docs`, the labels of metrics, the checks of keys and `weft ctl` know about a
route only what its entry says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.server.auth import Access
from weft.server.context import ServerContext
from weft.server.errors import ApiError

MODEL = "model"  # parameter of every route of a server with several models
Handler: TypeAlias = Callable[[ServerContext, Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()  # numbers in the query; the table of ranges has their bounds
    access: Access = "user"
    texts: tuple[str, ...] = ()  # texts in the query

    @property
    def is_open(self) -> bool:
        return self.access == "open"


def get(
    path: str,
    handler: Handler,
    summary: str,
    *,
    answer: type[msgspec.Struct] | None = None,
    query: tuple[str, ...] = (),
    access: Access = "user",
) -> Operation:
    """A route without a body, which changes nothing."""
    return Operation("GET", path, handler, summary, None, answer, query, access)


def delete(path: str, handler: Handler, summary: str, *, access: Access = "user") -> Operation:
    """A route without a body, which deletes what its path names."""
    return Operation("DELETE", path, handler, summary, access=access)


def post(
    path: str,
    handler: Handler,
    summary: str,
    body: type[msgspec.Struct] | None = None,
    *,
    answer: type[msgspec.Struct] | None = None,
    query: tuple[str, ...] = (),
    access: Access = "user",
    texts: tuple[str, ...] = (),
) -> Operation:
    return Operation("POST", path, handler, summary, body, answer, query, access, texts)


def with_known_query(one: Operation) -> Handler:
    """The handler of a route. One for administration refuses what its query does not have: unread,
    a misspelt parameter would mean something else. Others are as they are, because clients of other
    servers send parameters that have no meaning here."""
    if one.access != "admin":
        return one.handler
    known = (*one.query, *one.texts)

    async def call(context: ServerContext, request: Request) -> ASGIApp:
        for name in request.query_params:
            if name not in (*known, MODEL):
                there = f"its parameters are {', '.join(known)}" if known else "it has none"
                message = f"{request.url.path} has no parameter {name[:64]!r}: {there}"
                raise ApiError(400, message, param=name[:64])
        return await one.handler(context, request)

    return call
