"""Values that a model writes as bare text, as JSON by the schema of their argument.

XML has no types: `5` is a number where the tool's schema says so, and a text where it does not. A
text that fits no type of its schema is a JSON value if it can be read as one, else a string: what
the model has written is never lost. Knows nothing of calls and of their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from weft.text.parsers.calls import decoded, is_object
from weft.text.parsers.pythonic import translated
from weft.text.parsers.stream import Schema

MAX_REFS = 16  # references and alternatives that are followed, one behind the other
_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
# An exponent of four digits is infinite for every reader.
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")
# Templates that print values with Python's `str` show models these words.
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
        """`schema`: of the arguments, as an object. Without one nothing is known of them."""
        self._root = schema or {}
        self._found: dict[str, frozenset[str]] = {}

    def is_text(self, key: str) -> bool:
        """Whether the argument is a string, and nothing else."""
        return self._types(key) == {"string"}

    def as_json(self, key: str, text: str) -> str:
        """The value of the argument `key` that is written as `text`."""
        types = self._types(key)
        bare = text.strip()
        found = _fitting(bare, types)
        if found is not None:
            return found
        if "string" in types:
            return json_string(text)
        return any_json(text)  # it fits no type, or none is known

    def _types(self, key: str) -> frozenset[str]:
        """JSON's names of the types that the argument may have; empty if nothing is said."""
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
        # Values say their types only where no type is named.
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
        """What `#/a/b` points to; None if it is not there."""
        found: Any = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
        return found


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def any_json(text: str) -> str:
    """The JSON value that `text` is, else a string."""
    return _fitting(text.strip(), _ANY) or json_string(text)


_ANY = frozenset(["null", "boolean", "number", "array", "object"])


def _fitting(text: str, types: frozenset[str]) -> str | None:
    """`text` as JSON of one of `types`, strings left out; None if it fits none."""
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
    """An array or an object, in JSON or in the words of Python; None if it is neither."""
    if decoded(text) is not None:
        return text
    # The translator of Python's calls reads its literals, with the same bounds.
    call = translated(f"f(x={text})")
    if call is None or not is_object(call[1]):
        return None
    return call[1].removeprefix('{"x": ').removesuffix("}")
