"""Finds the `cache_control` marks of tools, system prompt and messages in Anthropic's form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec

from weft.server.anthropic.models import (
    AnthropicBlock,
    AnthropicMessage,
    Inner,
    MessagesRequest,
    Tool,
)
from weft.server.anthropic.translate import sampled_request
from weft.server.chat.models import ChatRequest
from weft.server.errors import ApiError
from weft.server.fields.cache_control import CacheControl, CacheMark, require_text, with_last

Body: TypeAlias = MessagesRequest
Varied: TypeAlias = Callable[[str], Body]
UNMARKED = ("thinking", "redacted_thinking")


def messages_marks(body: Body) -> list[CacheMark[ChatRequest]]:
    """All marks, in the order of the prompt. Raises `ApiError`."""
    found: list[CacheMark[ChatRequest]] = []
    last: CacheMark[ChatRequest] | None = None

    def visit(
        where: str,
        control: CacheControl | None,
        varied: Varied,
    ) -> None:
        nonlocal last
        as_chat = partial(_as_chat, varied)
        if control is not None:
            found.append(CacheMark(where, control.lasts, as_chat))
        if body.cache_control is not None:
            last = CacheMark(where, body.cache_control.lasts, as_chat)

    for index, tool in enumerate(body.tools or ()):
        visit(f"tools.{index}", tool.cache_control, partial(_after_tool, body, index))
    if isinstance(body.system, str) and body.system:
        visit("system", None, partial(_after_system, body, -1))
    elif body.system:
        for index, inner in enumerate(body.system):
            where = f"system.{index}"
            if inner.cache_control is not None:
                require_text(inner.text, f"{where}.text")
            visit(where, inner.cache_control, partial(_after_system, body, index))
    for index, message in enumerate(body.messages):
        where = f"messages.{index}.content"
        if isinstance(message.content, str):
            visit(where, None, partial(_after_block, body, index, -1))
            continue
        for number, block in enumerate(message.content):
            param = f"{where}.{number}"
            control = _control(block, param)
            if control is None and (block.type in UNMARKED or block.text == ""):
                continue
            visit(param, control, partial(_after_block, body, index, number))
    return with_last(found, body.cache_control, last)


def _control(block: AnthropicBlock, where: str) -> CacheControl | None:
    """The mark of a block, or of the last block inside it. Raises `ApiError` for a mark that is not
    allowed."""
    control = block.cache_control
    if control is not None and block.type in UNMARKED:
        message = f"{where}: cache_control cannot be set on {block.type} blocks"
        raise ApiError(400, message, param=where)
    if control is not None and block.type == "text":
        require_text(block.text, f"{where}.text")
    if control is None and isinstance(block.content, list):
        for inner in block.content:
            control = inner.cache_control or control
    return control


# ---- bodies with a text after a block


def _as_chat(varied: Varied, text: str) -> ChatRequest:
    return sampled_request(varied(text))


def _after_tool(
    body: Body,
    index: int,
    text: str,
) -> Body:
    tools = list(body.tools or ())
    tools.insert(index + 1, Tool(name=text, description=text))
    return msgspec.structs.replace(body, tools=tools)


def _after_system(
    body: Body,
    index: int,
    text: str,
) -> Body:
    """`index`: index of the block; -1: the system prompt is one text."""
    if isinstance(body.system, str):
        return msgspec.structs.replace(body, system=body.system + text)
    blocks = list(body.system or ())
    block = blocks[index]
    before = block.text or ""
    blocks[index] = msgspec.structs.replace(block, text=before + text)
    return msgspec.structs.replace(body, system=blocks)


def _after_block(
    body: Body,
    index: int,
    number: int,
    text: str,
) -> Body:
    """`number`: index of the block; -1: the content is one text."""
    message = body.messages[index]
    if isinstance(message.content, str):
        changed = msgspec.structs.replace(message, content=message.content + text)
        return _with_message(body, index, changed)
    blocks = list(message.content)
    block = blocks[number]
    match block.type:
        case "text":
            blocks[number] = msgspec.structs.replace(block, text=(block.text or "") + text)
        case "tool_use":
            old_input = block.input if isinstance(block.input, dict) else {}
            arguments = {**old_input, text: text}  # equal up to their end
            blocks[number] = msgspec.structs.replace(block, input=arguments)
        case "tool_result":
            blocks[number] = msgspec.structs.replace(block, content=_longer(block.content, text))
        case _:
            blocks.insert(number + 1, AnthropicBlock(type="text", text=text))
    return _with_message(body, index, msgspec.structs.replace(message, content=blocks))


def _longer(content: str | list[Inner] | None, text: str) -> str | list[Inner]:
    """The content of a result with `text` added at its end."""
    if isinstance(content, list):
        return [*content, Inner(type="text", text=text)]
    return (content or "") + text


def _with_message(
    body: Body,
    index: int,
    message: AnthropicMessage,
) -> Body:
    messages = list(body.messages)
    messages[index] = message
    return msgspec.structs.replace(body, messages=messages)
