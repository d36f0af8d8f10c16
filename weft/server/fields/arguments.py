"""The arguments of a call in the history: some APIs write an object, templates read a text."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def arguments_text(arguments: Any) -> str:
    """Arguments as JSON; null means none, and a text is taken for JSON."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(arguments, ensure_ascii=False)
