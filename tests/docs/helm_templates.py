"""The part of Helm's templates that deploy/helm uses: values, `if`, `range`, pipes and a few
functions.

Stricter than Helm: a value or a function that is not there is an error. What it cannot tell is
whether Helm itself takes the chart; the command for that is `helm lint deploy/helm`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"[^"]*"|\S+')


class _Piece(NamedTuple):
    """A text, or an action (`is_action`)."""

    text: str
    is_action: bool


def _quote(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printf(form: str, *values: object) -> str:
    return form % values


def _add(*values: int) -> int:
    return sum(values)


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "quote": _quote,
    "printf": _printf,
    "add": _add,
    "eq": operator.eq,
    "ne": operator.ne,
}


def render(template: str, data: Mapping[str, Any]) -> str:
    """The template with `data` (`Values`, `Release`). Raises ValueError for what is not known."""
    pieces = list(_pieces(template))
    text, rest = _block(pieces, data, data)
    if rest:
        raise ValueError(f"{rest[0].text} has no beginning")
    return text


def _pieces(template: str) -> Iterator[_Piece]:
    end = 0
    trims = False  # the action before takes the white space behind it
    for found in _ACTION.finditer(template):
        trims_left, action, trims_right = found.groups()
        text = template[end : found.start()]
        text = text.lstrip() if trims else text
        yield _Piece(text.rstrip() if trims_left else text, False)
        yield _Piece(action, True)
        end = found.end()
        trims = bool(trims_right)
    yield _Piece(template[end:].lstrip() if trims else template[end:], False)


def _block(pieces: list[_Piece], dot: Any, data: Mapping[str, Any]) -> tuple[str, list[_Piece]]:
    """The text up to the `end` of this block, and the pieces from there on."""
    text = ""
    while pieces:
        piece, *rest = pieces
        if not piece.is_action:
            text += piece.text
            pieces = rest
            continue
        if piece.text == "end":
            return text, pieces
        word, _, expression = piece.text.partition(" ")
        if word not in ("if", "range"):
            text += str(_value(piece.text, dot, data))
            pieces = rest
            continue
        value = _value(expression, dot, data)
        rounds = value if word == "range" else [dot] if value else []
        for one in rounds:
            text += _block(rest, one, data)[0]
        pieces = _after_end(rest)
    return text, []


def _after_end(pieces: list[_Piece]) -> list[_Piece]:
    depth = 1
    for number, piece in enumerate(pieces):
        if piece.is_action:
            depth += piece.text.startswith(("if ", "range "))
            depth -= piece.text == "end"
        if depth == 0:
            return pieces[number + 1 :]
    raise ValueError("a block has no end")


def _value(expression: str, dot: Any, data: Mapping[str, Any]) -> Any:
    piped: list[Any] = []
    for part in expression.split(" | "):
        first, *words = _WORD.findall(part)
        arguments = [_word(word, dot, data) for word in words] + piped
        if first in FUNCTIONS:
            piped = [FUNCTIONS[first](*arguments)]
        elif arguments:
            raise ValueError(f"{first} is no function that is known here")
        else:
            piped = [_word(first, dot, data)]
    return piped[0]


def _word(word: str, dot: Any, data: Mapping[str, Any]) -> Any:
    if word.startswith('"'):
        return word.strip('"')
    if word.isdecimal():
        return int(word)
    if word == ".":
        return dot
    if not word.startswith("."):
        raise ValueError(f"{word} is no value that is known here")
    value: Any = data
    for name in word.removeprefix(".").split("."):
        if name not in value:
            raise ValueError(f"{word}: there is no {name}")
        value = value[name]
    return value
