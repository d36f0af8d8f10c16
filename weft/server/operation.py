"""A route of the server, as the tables say it: `ROUTES` in the module that answers it.

What is said here is all that `/openapi.json`, `/docs`, the labels of the metrics, the keys and
`weft ctl` know of a route.
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

Handler: TypeAlias = Callable[[ServerContext, Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()  # numbers behind the path, which stand in the table of ranges
    access: Access = "user"

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
    """A route without a body, that changes nothing."""
    return Operation("GET", path, handler, summary, None, answer, query, access)


def delete(path: str, handler: Handler, summary: str, *, access: Access = "user") -> Operation:
    """A route without a body, that takes away what its path names."""
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
) -> Operation:
    return Operation("POST", path, handler, summary, body, answer, query, access)
