"""The engine that an HTTP request names, if it names one: set by the server, read by the fleet."""

from __future__ import annotations

from contextvars import ContextVar

wanted_rank: ContextVar[int | None] = ContextVar("wanted_rank", default=None)
