"""Converts arguments in bare text to JSON, by the schema of the tool.

XML has no types: the tool's schema decides whether `5` is a number or a text. A text that fits no
type of its schema becomes a JSON value if it can be read as one, else a string: no text of the
model is lost. Knows no calls and no marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from weft.text.parsers.calls import decoded, is_object
from weft.text.parsers.pythonic import translated
from weft.text.parsers.stream import Schema

MAX_REFS = 16  # nested references and alternatives that are followed
_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
# Numbers with an exponent of four digits are infinite for every JSON reader.
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")
# Python's words, too: some templates print values with Python's `str`, and models copy them.
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false"}
_NULLS = frozenset(["null", "None"])
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_PYTHON_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


class ArgumentTypes:
    """The types of the arguments of one tool."""

    def __init__(self, schema: Schema | None) -> None:
        """`schema`: the schema of the object of arguments; None: their types are unknown."""
        self._root = schema or {}
        self._found: dict[str, frozenset[str]] = {}

    def is_text(self, key: str) -> bool:
        """Whether the argument can only be a string."""
        return self._types(key) == {"string"}

    def as_json(self, key: str, text: str) -> str:
        """The value `text` of the argument `key`, as JSON."""
        types = self._types(key)
        bare = text.strip()
        found = _fitting(bare, types)
        if found is not None:
            return found
        if "string" in types:
            return json_string(text)
        return any_json(text)  # it fits no type, or the types are unknown

    def _types(self, key: str) -> frozenset[str]:
        """The JSON types that the argument may have; empty if the schema does not say it."""
        found = self._found.get(key)
        if found is None:
            properties = self._root.get("properties")
            schema = None
            if isinstance(properties, Mapping):
                schema = properties.get(key)
            if schema is None:
                schema = self._root.get("additionalProperties")
            found = frozenset(self._named(schema, MAX_REFS))
            self._found[key] = found
        return found

    def _named(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return set()
        names: set[str] = set()
        named = schema.get("type")
        if isinstance(named, str):
            names.add(named)
        elif isinstance(named, list):
            names.update(name for name in named if isinstance(name, str))
        # The values define the types only if the schema names no type.
        if not names and isinstance(schema.get("enum"), list):
            names.update(_PYTHON_NAMES.get(type(value), "") for value in schema["enum"])
        if not names and "const" in schema:
            names.add(_PYTHON_NAMES.get(type(schema["const"]), ""))
        for keyword in _ALTERNATIVES:
            alternatives = schema.get(keyword)
            if isinstance(alternatives, list):
                for alternative in alternatives[:MAX_REFS]:
                    names |= self._named(alternative, depth - 1)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            names |= self._named(self._at(ref), depth - 1)
        if schema.get("nullable") is True:
            names.add("null")
        return names

    def _at(self, ref: str) -> Any:
        """The target of a reference `#/a/b`; None if it does not exist."""
        found: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
        return found


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def any_json(text: str) -> str:
    """`text` as the JSON value that it spells, else as a string."""
    return _fitting(text.strip(), _ANY) or json_string(text)


_ANY = frozenset(["null", "boolean", "number", "array", "object"])


def _fitting(text: str, types: frozenset[str]) -> str | None:
    """`text` as JSON of one of `types` other than string; None if it fits none."""
    if "null" in types and text in _NULLS:
        return "null"
    if "boolean" in types and text in _WORDS:
        return _WORDS[text]
    if "integer" in types:
        integer = _INTEGER.fullmatch(text)
        if integer is not None:
            return integer[1]
    if "number" in types and _NUMBER.fullmatch(text) and decoded(text) is not None:
        return text
    for name, bracket in (("array", "["), ("object", "{")):
        if name in types and text.startswith(bracket):
            return _structure(text)
    return None


def _structure(text: str) -> str | None:
    """An array or object in JSON or in Python's notation, as JSON; None if it is neither."""
    if decoded(text) is not None:
        return text
    # The translator of Python calls also reads Python literals, with the same limits.
    call = translated(f"f(x={text})")
    if call is None or not is_object(call[1]):
        return None
    return call[1].removeprefix('{"x": ').removesuffix("}")
