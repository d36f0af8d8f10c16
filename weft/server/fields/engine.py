"""The engine that a request selects: in its body by SGLang's `routed_dp_rank`, or by vLLM's header
X-data-parallel-rank."""

from __future__ import annotations

from collections.abc import Sequence

from weft.client.fleet.wanted import wanted_rank
from weft.server.errors import ApiError
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


def want_engine_of_header(text: str, num_engines: int) -> None:
    """Like `want_engine`, for the value of the header."""
    want_engine(header_number(text, FIELD, HEADER), num_engines, HEADER)
