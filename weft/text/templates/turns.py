"""Turns of a conversation, put together from messages that a template does not take one by one.

Knows roles and contents; the modules beside it know which messages these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.json_types import JsonObject

SYSTEM_ROLES = ("system", "developer")
RESULT_ROLES = ("tool", "function")

Message = JsonObject
Content = str | list[JsonObject]


class Turn(NamedTuple):
    message: Message
    merges: bool  # it becomes one with a neighbour of the same role


def joined_turns(turns: Iterable[Turn]) -> list[Message]:
    """The messages, with neighbours of the same role as one if one of them merges: many templates
    want turns of user and assistant."""
    found: list[Turn] = []
    for message, merges in turns:
        last = found[-1] if found else Turn({}, merges=False)
        if last.message.get("role") != message.get("role") or not (merges or last.merges):
            found.append(Turn(message, merges))
            continue
        between = "" if message["role"] == "assistant" else "\n"
        before = last.message.get("content") or ""
        content = put_together(before, between, message.get("content") or "")
        found[-1] = Turn({**message, **last.message, "content": content}, merges=True)
    return [turn.message for turn in found]


def put_together(*contents: Content) -> Content:
    """Contents one after the other: one text, or a list of parts if one of them has other parts
    than text."""
    if all(isinstance(one, str) or _is_text(one) for one in contents):
        return "".join(one if isinstance(one, str) else _lines(one) for one in contents)
    parts: list[JsonObject] = []
    for one in contents:
        added = _as_parts(one)
        if parts and added and _is_text([parts[-1], added[0]]):
            parts[-1] = {**parts[-1], "text": parts[-1]["text"] + added[0]["text"]}
            added = added[1:]
        parts += added
    return parts


def _as_parts(content: Content) -> list[JsonObject]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _is_text(parts: list[JsonObject]) -> bool:
    return all(isinstance(part.get("text"), str) and part.get("type") == "text" for part in parts)


def _lines(parts: list[JsonObject]) -> str:
    return "\n".join(part["text"] for part in parts)
