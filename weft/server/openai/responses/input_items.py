"""The input of a stored response, as items with ids: what they look like, and pages of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from weft.config.numbers import shown
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.openai.responses.models import ResponseItem, ResponseItemList

DEFAULT_LIMIT = 20  # items in one answer, as OpenAI has it
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def item_id(kind: str) -> str:
    """A new name for an item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}"


def input_items(given: str | Sequence[ResponseItem]) -> list[dict[str, Any]]:
    """The input of one request as items.

    Each has an id of its own: the client's, unless another item has it.
    """
    items = [ResponseItem(role="user", content=given)] if isinstance(given, str) else given
    taken: set[str] = set()
    found = []
    for item in items:
        id = item.id
        if not id or id in taken:
            id = item_id(item.type)
        taken.add(id)
        found.append(_told(item, id))
    return found


def page(items: Sequence[dict[str, Any]], request: Request) -> ResponseItemList:
    """The items that a query asks for: `limit` of them behind `after`, the last first unless
    `order` is "asc".

    Raises `ApiError` for a value that is not allowed.
    """
    query = request.query_params
    limit = int(query_number(request, "limit", DEFAULT_LIMIT))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {shown(order)}; asc and desc are allowed", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = _begin(ordered, query.get("after"))
    data = ordered[begin : begin + limit]
    ids = [item["id"] for item in data] or [None]
    return ResponseItemList(
        data=data, first_id=ids[0], last_id=ids[-1], has_more=begin + limit < len(ordered)
    )


def _begin(items: Sequence[dict[str, Any]], after: str | None) -> int:
    """The place of the first item behind the one of that id."""
    if after is None:
        return 0
    for place, item in enumerate(items):
        if item["id"] == after:
            return place + 1
    raise ApiError(
        400, f"after is {shown(after)}, which is the id of none of the items", param="after"
    )


def _told(item: ResponseItem, id: str) -> dict[str, Any]:
    """An item as clients read it: texts of messages and of reasoning are lists of parts, whatever
    the client sent.
    """
    fields = {key: value for key, value in msgspec.to_builtins(item).items() if value is not None}
    told = {**fields, "id": id, "type": item.type, "status": "completed"}
    if isinstance(item.content, str):
        kind = _part_type(item)
        told["content"] = [{"type": kind, "text": item.content}]
    elif item.content is not None:
        told["content"] = [{"type": part.type, "text": part.text or ""} for part in item.content]
    return told


def _part_type(item: ResponseItem) -> str:
    if item.type == "reasoning":
        return "reasoning_text"
    return "output_text" if item.role == "assistant" else "input_text"
