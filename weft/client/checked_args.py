"""Arguments that Python programs give to `weft.LLM`: their types are checked here, so that no wrong
one ends in an error from inside. It knows no ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from weft.config.numbers import shown
from weft.messages.sampling import InvalidParam

PROMPT = "a text, token ids, an array of input embeddings or a dictionary with a prompt"


def wrong_value(name: str, value: Any, expected: str) -> InvalidParam:
    """The error for an argument of another type. `expected`: what is allowed, without a verb."""
    return InvalidParam(name, f"{name} is {shown(value)}; {expected} is expected")


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise wrong_value(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise wrong_value(name, value, "a text of valid Unicode") from exc


def require_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise wrong_value(name, value, "True or False")


def items_of(name: str, value: Any, expected: str) -> Iterator[Any]:
    """The items of a list, or of what can be read like one, as they come."""
    if isinstance(value, str | bytes | bytearray | Mapping | type):
        raise wrong_value(name, value, expected)
    try:
        return iter(value)
    except TypeError as exc:
        raise wrong_value(name, value, expected) from exc


def as_items(name: str, value: Any, expected: str) -> list[Any]:
    """The same as a list."""
    return list(items_of(name, value, expected))


def as_prompts(name: str, value: Any) -> list[Any]:
    """A list of prompts, of one or of many."""
    if isinstance(value, str | np.ndarray | Mapping):
        return [value]
    items = as_items(name, value, f"{PROMPT}, or a list of these,")
    if items and isinstance(items[0], Integral):
        return [items]
    for index, one in enumerate(items):
        if not _is_prompt(one):
            raise wrong_value(f"{name}[{index}]", one, PROMPT)
    return items


def _is_prompt(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | type)


def as_conversations(value: Any) -> list[Any]:
    """A list of conversations, of one or of many. Each has a message or more."""
    expected = "a list of messages, or a list of such lists,"
    items = as_items("messages", value, expected)
    if items and isinstance(items[0], Mapping):
        return [items]
    for index, conversation in enumerate(items):
        as_messages(f"messages[{index}]", conversation)
    return items


def as_messages(name: str, value: Any) -> list[Any]:
    """The messages of one conversation."""
    messages = as_items(name, value, "a list of messages")
    if not messages:
        raise InvalidParam(name, f"{name} is empty; 1 message or more is expected")
    return messages
