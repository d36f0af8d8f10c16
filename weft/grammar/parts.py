"""The parts of a grammar that a client has written, and where its body has them.

The error of a whole grammar shows rules that its author has not written, and not which part is
wrong. So each part is compiled alone, if the whole is wrong. A schema says its path by the key
`PATH_KEY`, which libraries ignore, a grammar inside a structural tag by its field `path`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from weft.grammar.protocol import Key
from weft.json_types import PATH_KEY, JsonObject

MAX_SHOWN = 80  # characters of a grammar that a message shows


class ClientPart(NamedTuple):
    path: str  # empty: it is not known
    key: Key  # the part as a grammar of its own
    shown: str = ""  # the beginning of its text, if a message shows it


def wrong_part(key: Key, error_of: Callable[[Key], str]) -> str:
    """The error of the first part that is wrong by itself, with its path; empty if none is.

    `error_of` compiles a grammar; empty: it is right.
    """
    with suppress(ValueError, RecursionError):  # the text is no JSON, or nested too deeply
        for part in _parts(key):
            error = error_of(part.key)
            if error:
                shown = f"; the grammar is {part.shown!r}" if part.shown else ""
                return f"{before_error(part.path)}{error}{shown}"
    return ""


def before_error(path: Any) -> str:
    return f"{path}: " if isinstance(path, str) and path else ""


def _parts(key: Key) -> Iterator[ClientPart]:
    match key.kind:
        case "structural_tag":
            yield from _of_format(json.loads(key.text), key.strict)
        case "json_schema":
            yield from _of_calls(json.loads(key.text), key.strict)


def _of_format(format: Any, strict: bool) -> Iterator[ClientPart]:
    """The grammars and the placed schemas inside a format, in order. The format may be wrong."""
    if isinstance(format, list):
        for one in format:
            yield from _of_format(one, strict)
    elif isinstance(format, dict):
        definition = format.get("definition")
        syntax = format.get("syntax")
        if syntax in ("lark", "regex") and isinstance(definition, str):
            key = Key("regex" if syntax == "regex" else "ebnf", definition)
            yield ClientPart(str(format.get("path", "")), key, definition[:MAX_SHOWN])
        elif isinstance(format.get(PATH_KEY), str):
            yield ClientPart(format[PATH_KEY], Key("json_schema", json.dumps(format), strict))
        else:
            yield from _of_format(list(format.values()), strict)


def _of_calls(schema: Any, strict: bool) -> Iterator[ClientPart]:
    """The schemas of the arguments in a list of calls. References are pointers from the root, so
    that each part keeps its position in the list."""
    items = schema.get("items") if isinstance(schema, dict) else None
    if not isinstance(items, dict):
        return
    calls = items.get("anyOf", [items])
    for index, call in enumerate(calls):
        path = _path_of(call)
        if path:
            alone: JsonObject = call
            if "anyOf" in items:
                alone = {"anyOf": [{} if one is not call else call for one in calls[: index + 1]]}
            yield ClientPart(
                path, Key("json_schema", json.dumps({**schema, "items": alone}), strict)
            )


def _path_of(call: Any) -> str:
    with suppress(KeyError, TypeError):
        return str(call["properties"]["parameters"][PATH_KEY])
    return ""
