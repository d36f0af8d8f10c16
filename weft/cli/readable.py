"""Formats a JSON answer as readable lines, for any kind of answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from weft.json_types import JsonObject


def readable(answer: Any, indent: str = "") -> Iterator[str]:
    """JSON as lines.

    Simple values are `name  value`; others are indented below their name; lists become columns.
    """
    if isinstance(answer, dict):
        yield from _members(answer, indent)
    elif isinstance(answer, list) and answer and all(map(_is_flat, answer)):
        yield from _columns(answer, indent)
    elif isinstance(answer, list):
        for one in answer:
            yield from readable(one, indent)
    else:
        for line in _plain(answer).splitlines():
            yield indent + line


def _members(answer: JsonObject, indent: str) -> Iterator[str]:
    simple = [name for name, value in answer.items() if not isinstance(value, dict | list)]
    width = max(map(len, simple), default=0)
    for name, value in answer.items():
        if not isinstance(value, dict | list):
            yield f"{indent}{name:{width}}  {_plain(value)}"
        elif value:
            yield f"{indent}{name}"
            yield from readable(value, indent + "  ")
        else:
            yield f"{indent}{name}: none"


def _is_flat(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return not any(isinstance(one, dict | list) for one in value.values())


def _columns(rows: list[JsonObject], indent: str) -> Iterator[str]:
    # Of all rows, in order of appearance; columns without a single value are left out.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(name for name, value in row.items() if value not in (None, ""))

    def cells_of(row: JsonObject) -> list[str]:
        return [_plain(row.get(name)) for name in names]

    table = [list(names), *map(cells_of, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = map(str.ljust, line, widths)
        yield indent + "  ".join(cells).rstrip()


def _number(value: float) -> str:
    """A number as people read it: at most three decimals, or four digits below 1."""
    if abs(value) < 1 or not math.isfinite(value):
        return f"{value:.4g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _plain(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return _number(value)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(value))
