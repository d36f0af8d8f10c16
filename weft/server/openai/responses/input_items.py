"""The input of a stored response, as items with ids, and its pages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from weft.json_types import JsonObject
from weft.server.fields.paging import page_of
from weft.server.openai.responses.models import (
    ResponseItem,
    ResponseItemList,
    ResponsePart,
)

DEFAULT_LIMIT = 20  # items in one answer, OpenAI's default
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def item_id(kind: str) -> str:
    """A new id for an item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}"


def input_items(request_input: str | Sequence[ResponseItem]) -> list[JsonObject]:
    """The input of one request as items.

    Each item gets a unique id: the client's, unless another item has it.
    """
    if isinstance(request_input, str):
        request_input = [ResponseItem(role="user", content=request_input)]
    taken: set[str] = set()
    found = []
    for item in request_input:
        id = item.id
        if not id or id in taken:
            id = item_id(item.type)
        taken.add(id)
        found.append(_item_fields(item, id))
    return found


def page(items: Sequence[JsonObject], request: Request) -> ResponseItemList:
    """The items that a query selects, the last first unless `order` is asc. Raises `ApiError`."""
    found = page_of(request, items[::-1], lambda item: str(item["id"]), DEFAULT_LIMIT)
    return ResponseItemList(
        data=found.records,
        first_id=found.first_id,
        last_id=found.last_id,
        has_more=found.has_more,
    )


def _item_fields(item: ResponseItem, id: str) -> JsonObject:
    """An item in the form for clients.

    Texts of messages and of reasoning are lists of parts, whatever the client sent.
    """
    every: JsonObject = msgspec.to_builtins(item)
    fields = {name: value for name, value in every.items() if value is not None}
    fields["id"] = id
    fields["type"] = item.type
    fields["status"] = "completed"
    if isinstance(item.content, str):
        fields["content"] = [{"type": _part_type(item), "text": item.content}]
    elif item.content is not None:
        fields["content"] = [_part_fields(part) for part in item.content]
    return fields


def _part_fields(part: ResponsePart) -> JsonObject:
    if part.type == "input_image":
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
    if part.type == "input_audio":
        return {"type": part.type, "input_audio": msgspec.to_builtins(part.input_audio)}
    return {"type": part.type, "text": part.text or ""}


def _part_type(item: ResponseItem) -> str:
    if item.type == "reasoning":
        return "reasoning_text"
    return "output_text" if item.role == "assistant" else "input_text"
