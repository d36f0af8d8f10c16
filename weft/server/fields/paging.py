"""Pages of a list, as OpenAI's APIs have them: `?limit`, `?after` and `?order` select."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request

from weft.config.numbers import shown
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number

T = TypeVar("T")


class Page(NamedTuple, Generic[T]):
    records: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool  # more records follow


def page_of(
    request: Request, newest_first: Sequence[T], id_of: Callable[[T], str], default: int
) -> Page[T]:
    """The records that a query selects: `limit` (`default` without one) after the one with the id
    `after`, oldest first if `order` is asc. Raises `ApiError`."""
    query = request.query_params
    limit = int(query_number(request, "limit", default))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {shown(order)}; asc and desc are allowed", param="order")
    records = list(newest_first)
    if order == "asc":
        records.reverse()
    after = query.get("after")
    if after is not None:
        ids = [id_of(one) for one in records]
        if after not in ids:
            message = f"after is {shown(after)}, which is the id of none of them"
            raise ApiError(400, message, param="after")
        records = records[ids.index(after) + 1 :]
    found = records[:limit]
    first_id = id_of(found[0]) if found else None
    last_id = id_of(found[-1]) if found else None
    return Page(found, first_id, last_id, has_more=len(found) < len(records))
