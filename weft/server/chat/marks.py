"""Finds the `cache_control` marks of the messages and tools of a chat request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import ChatMessage, ChatRequest, ContentPart, TranslatedChat
from weft.server.fields.cache_control import CacheMark, control_of, require_text, with_last


def has_marked_tool(tools: Sequence[JsonObject]) -> bool:
    """Whether a tool has a mark."""
    return any(_of_tool(tool) is not None for tool in tools)


def chat_marks(body: ChatRequest) -> list[CacheMark[ChatRequest]]:
    """All marks, in the order of the prompt. Raises `ApiError`."""
    found: list[CacheMark[ChatRequest]] = []
    for index, tool in enumerate(body.tools or ()):
        where = f"tools.{index}"
        control = control_of(_of_tool(tool), where)
        if control is not None:
            found.append(CacheMark(where, control.lasts, partial(_after_tool, body, index)))
    last: CacheMark[ChatRequest] | None = None
    for index, message in enumerate(body.messages):
        where = f"messages.{index}"
        for number, part in enumerate(_parts(message)):
            param = f"{where}.content.{number}"
            varied = partial(_after_part, body, index, number)
            if part.cache_control is not None:
                if part.type == "text":
                    require_text(part.text, f"{param}.text")
                found.append(CacheMark(param, part.cache_control.lasts, varied))
            last = _last(param, body, varied)
        if not _parts(message):
            last = _last(where, body, partial(_after_message, body, index))
        control = message.cache_control
        if control is not None:
            if not message.tool_calls:
                require_text(_text_of(message), where)
            varied = partial(_after_message, body, index)
            if last is not None and _parts(message):
                where = last.where
            found.append(CacheMark(where, control.lasts, varied))
    return with_last(found, body.cache_control, last)


def _last(
    where: str, body: ChatRequest, varied: Callable[[str], ChatRequest]
) -> CacheMark[ChatRequest] | None:
    """The mark that `cache_control` of the whole body puts here, if it is the last block."""
    if body.cache_control is None:
        return None
    return CacheMark(where, body.cache_control.lasts, varied)


def _of_tool(tool: JsonObject) -> Any:
    """The `cache_control` of a tool, beside its function or inside it."""
    found = tool.get("cache_control")
    function = tool.get("function")
    if found is None and isinstance(function, dict):
        found = function.get("cache_control")
    return found


def _parts(message: ChatMessage) -> list[ContentPart]:
    if isinstance(message.content, list):
        return message.content
    return []


def _text_of(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or part.type for part in _parts(message))


# ---- bodies with a text after a block


def _after_tool(
    body: ChatRequest,
    index: int,
    text: str,
) -> ChatRequest:
    tools = list(body.tools or ())
    function = {"name": text, "description": text, "parameters": {}}
    tools.insert(index + 1, {"type": "function", "function": function})
    if isinstance(body, TranslatedChat):
        # Only errors need the paths, and these tools have had none.
        return msgspec.structs.replace(body, tools=tools, tool_paths=[])
    return msgspec.structs.replace(body, tools=tools)


def _after_part(
    body: ChatRequest,
    index: int,
    number: int,
    text: str,
) -> ChatRequest:
    parts = list(_parts(body.messages[index]))
    part = parts[number]
    if part.type == "text":
        parts[number] = msgspec.structs.replace(part, text=(part.text or "") + text)
    else:
        parts.insert(number + 1, ContentPart(type="text", text=text))
    return _with_message(body, index, msgspec.structs.replace(body.messages[index], content=parts))


def _after_message(
    body: ChatRequest,
    index: int,
    text: str,
) -> ChatRequest:
    message = body.messages[index]
    parts = _parts(message)
    if parts:
        return _after_part(body, index, len(parts) - 1, text)
    if message.tool_calls:
        calls = [*message.tool_calls[:-1], _longer(message.tool_calls[-1], text)]
        changed = msgspec.structs.replace(message, tool_calls=calls)
    else:
        changed = msgspec.structs.replace(message, content=str(message.content or "") + text)
    return _with_message(body, index, changed)


def _longer(
    call: JsonObject,
    text: str,
) -> JsonObject:
    """A call that is equal to `call` up to the end of its arguments."""
    function = dict(call.get("function") or {})
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
        function["arguments"] = msgspec.json.encode({**arguments, text: text}).decode()
    except (msgspec.DecodeError, TypeError):  # arguments are no object: equal up to the name
        function["name"] = text
    return {**call, "function": function}


def _with_message(
    body: ChatRequest,
    index: int,
    message: ChatMessage,
) -> ChatRequest:
    messages = list(body.messages)
    messages[index] = message
    return msgspec.structs.replace(body, messages=messages)
