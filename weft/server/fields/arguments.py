"""The arguments of a call in the history: some APIs write an object, templates read a text."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def arguments_text(given: Any) -> str:
    """Arguments as JSON; null means none, and a text is taken for JSON."""
    if given is None:
        return "{}"
    if isinstance(given, str):
        return given
    try:
        return msgspec.json.encode(given).decode()
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(given, ensure_ascii=False)
