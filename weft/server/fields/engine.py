"""The engine that a request selects on a server with several: in its body by SGLang's
`routed_dp_rank`, or by vLLM's header X-data-parallel-rank."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.client.fleet.wanted import wanted_rank
from weft.server.errors import ApiError, error_response
from weft.server.fields.numbers import header_number

HEADER = "X-data-parallel-rank"
FIELD = "routed_dp_rank"


def want_engine(rank: int, num_engines: int, shown_name: str = FIELD) -> None:
    """Send the current request to engine `rank`. Raises `ApiError` if there is no such engine.
    `shown_name`: the name of the field or header, for the message."""
    if rank >= num_engines:
        message = f"{shown_name} is {rank}; 0 to {num_engines - 1} are allowed, one for each engine"
        if num_engines == 1:
            message = f"{shown_name} is {rank}; only 0 is allowed: this server has one engine"
        raise ApiError(400, message, param=FIELD)
    wanted_rank.set(rank)


def want_engine_of(ranks: Sequence[int | None], num_engines: int) -> None:
    """Like `want_engine`, for the fields of a body: one of them, or several with the same value."""
    named = [rank for rank in ranks if rank is not None]
    if len(set(named)) > 1:
        message = "routed_dp_rank and data_parallel_rank are the same; give one of them"
        raise ApiError(400, message, param=FIELD)
    want_engine(named[0], num_engines)


class EngineHeader:
    """Reads the header of every request. A server with one engine does not use it."""

    def __init__(self, app: ASGIApp, num_engines: int) -> None:
        self._app = app
        self._num_engines = num_engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = Headers(scope=scope).get(HEADER)
        if text is not None:
            try:
                want_engine(header_number(text, FIELD, HEADER), self._num_engines, HEADER)
            except ApiError as exc:
                await error_response(exc)(scope, receive, send)
                return
        await self._app(scope, receive, send)
