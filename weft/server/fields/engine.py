"""The engine that a request selects: in its body by SGLang's `routed_dp_rank` or its older name
`data_parallel_rank`, or by vLLM's header X-data-parallel-rank."""

from __future__ import annotations

from typing import Protocol

from weft.client.fleet.wanted import wanted_rank
from weft.server.errors import ApiError
from weft.server.fields.numbers import header_number

HEADER = "X-data-parallel-rank"
FIELD = "routed_dp_rank"
OLDER_FIELD = "data_parallel_rank"


class EngineFields(Protocol):
    """A body that may name an engine."""

    routed_dp_rank: int | None
    data_parallel_rank: int | None


def want_engine(rank: int, num_engines: int, field: str, shown_name: str) -> None:
    """Send the current request to engine `rank`. Raises `ApiError` if there is no such engine.
    `shown_name`: the name of the field or header, for the message."""
    if rank >= num_engines:
        message = f"{shown_name} is {rank}; 0 to {num_engines - 1} are allowed, one for each engine"
        if num_engines == 1:
            message = f"{shown_name} is {rank}; only 0 is allowed: this server has one engine"
        raise ApiError(400, message, param=field)
    wanted_rank.set(rank)


def want_engine_of(body: EngineFields, num_engines: int) -> None:
    """Like `want_engine`, for the fields of a body: one of them, or both with the same value."""
    ranks = {FIELD: body.routed_dp_rank, OLDER_FIELD: body.data_parallel_rank}
    named = {field: rank for field, rank in ranks.items() if rank is not None}
    if len(set(named.values())) > 1:
        message = f"{FIELD} and {OLDER_FIELD} are the same; give one of them"
        raise ApiError(400, message, param=FIELD)
    for field, rank in named.items():
        want_engine(rank, num_engines, field, field)


def want_engine_of_header(text: str, num_engines: int) -> None:
    """Like `want_engine`, for the value of the header."""
    want_engine(header_number(text, FIELD, HEADER), num_engines, FIELD, HEADER)
