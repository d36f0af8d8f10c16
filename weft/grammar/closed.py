"""JSON schemas whose objects have the properties that they name, and no others, unless they say so.

A schema that lists properties and is silent about others allows any: a small model then goes on inventing
them until its tokens are used up. Here silence forbids them, as in other engines; `"additionalProperties":
true`, or a schema, allows them. Knows nothing of grammar libraries.

Schemas that hold for one object together (`allOf`, `anyOf` beside `properties`, ...) stay as they are where
more than one of them names properties: each would forbid what the others name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_NAMING = ("properties", "patternProperties")
_SAYS_IT = ("additionalProperties", "unevaluatedProperties")
_TOGETHER = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_CONDITIONS = (
    "not",
    "if",
    "then",
    "else",
)  # mean something else when they forbid more, as does dependentSchemas
_IN_ONE = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems")
_IN_LIST = ("prefixItems", "items", *_TOGETHER)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def closed(schema: Any) -> Any:
    """A copy of `schema` in which objects that name properties forbid all others. Raises RecursionError."""
    return _Closing(schema).copy(schema)


def is_compact(schema: Any) -> bool:
    """Whether the JSON is to have a space behind each comma and colon, and no other white space. The key is
    llguidance's."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("whitespace_flexible") is False


class _Closing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: set[int] = set()  # ids of schemas of the original that stay as they are
        for schema in _all(root):
            self._leave_open(schema)

    def copy(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        for key in _IN_ONE:
            if isinstance(schema.get(key), dict):
                result[key] = self.copy(schema[key])
        for key in _IN_LIST:
            if isinstance(schema.get(key), list):
                result[key] = [self.copy(one) for one in schema[key]]
        for key in _BY_NAME:
            if isinstance(schema.get(key), dict):
                result[key] = {name: self.copy(one) for name, one in schema[key].items()}
        if _is_silent(schema) and id(schema) not in self._open:
            result["additionalProperties"] = False
        return result

    def _leave_open(self, schema: dict[str, Any]) -> None:
        """Note the schemas that name properties of the same object as others do."""
        conditions = _conditions(schema)
        for condition in conditions:
            self._open.update(id(one) for one in self._naming(condition))
        if conditions and any(_names(one) for condition in conditions for one in _all(condition)):
            self._open.add(id(schema))
        sources = [[schema]] if _names(schema) else []
        sources += [self._naming(one) for one in schema.get("allOf") or () if isinstance(one, dict)]
        for key in ("anyOf", "oneOf"):  # of these one holds, beside the rest
            choices = [one for one in schema.get(key) or () if isinstance(one, dict)]
            sources.append([naming for one in choices for naming in self._naming(one)])
        if target := self._target(schema):
            sources.append(self._naming(target))
        sources = [source for source in sources if source]
        nameless = [part for part in self._parts(schema, _TOGETHER) if not _names(part)]
        required = {
            name
            for part in [*self._parts(schema, ("allOf",)), *nameless]
            for name in _required(part)
        }
        for naming in (one for source in sources for one in source):
            if len(sources) > 1 or _needs_others(naming, required):
                self._open.add(id(naming))

    def _naming(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """`schema` and what holds together with it, as far as it names properties."""
        return [one for one in self._parts(schema, _TOGETHER, with_conditions=True) if _names(one)]

    def _parts(
        self, schema: dict[str, Any], keys: tuple[str, ...], *, with_conditions: bool = False
    ) -> list[dict[str, Any]]:
        """`schema` and what holds for the same value: below these keys, and where `$ref` points to."""
        found: dict[int, dict[str, Any]] = {}
        pending = [schema]
        while pending:
            one = pending.pop()
            if id(one) in found:
                continue
            found[id(one)] = one
            pending += [
                part for key in keys for part in one.get(key) or () if isinstance(part, dict)
            ]
            pending += _conditions(one) if with_conditions else []
            if target := self._target(one):
                pending.append(target)
        return list(found.values())

    def _target(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """What its `$ref` points to in this document."""
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        place = self._root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            else:
                place = place.get(key) if isinstance(place, dict) else None
        return place if isinstance(place, dict) else None


def _names(schema: dict[str, Any]) -> bool:
    return any(isinstance(schema.get(key), dict) for key in _NAMING)


def _is_silent(schema: dict[str, Any]) -> bool:
    """Whether it names properties and does not say whether there may be others."""
    return _names(schema) and not any(key in schema for key in _SAYS_IT)


def _needs_others(schema: dict[str, Any], required: set[str]) -> bool:
    """Whether there is no value without properties that it does not name."""
    if isinstance(schema.get("patternProperties"), dict):
        return False
    named, least = schema["properties"], schema.get("minProperties")
    return not required <= named.keys() or (isinstance(least, int) and least > len(named))


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _conditions(schema: dict[str, Any]) -> list[dict[str, Any]]:
    dependent = schema.get("dependentSchemas")
    values = [schema.get(key) for key in _CONDITIONS]
    values += list(dependent.values()) if isinstance(dependent, dict) else []
    return [value for value in values if isinstance(value, dict)]


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """`schema` and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in (*_IN_ONE, "not", "if", "then", "else"):
        yield from _all(schema.get(key))
    for key in _IN_LIST:
        value = schema.get(key)
        for one in value if isinstance(value, list) else ():
            yield from _all(one)
    for key in (*_BY_NAME, "dependentSchemas"):
        value = schema.get(key)
        for one in value.values() if isinstance(value, dict) else ():
            yield from _all(one)
