"""JSON schemas whose objects have only the properties that they name, unless they allow others.

By the standard, a schema that lists properties and does not mention others allows any: a small
model then invents properties until its tokens are used up. Here such a schema forbids others, as in
other engines; `"additionalProperties": true`, or a schema, allows them. This module knows nothing
of grammar libraries.

Schemas that apply to the same object (`allOf`, `anyOf` beside `properties`, ...) stay unchanged if
more than one of them names properties: each would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from weft.json_types import JsonObject

_NAMING = ("properties", "patternProperties")
_SAYS_IT = ("additionalProperties", "unevaluatedProperties")
_TOGETHER = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
# Their meaning would change if they forbade more; likewise dependentSchemas.
_CONDITIONS = ("not", "if", "then", "else")
_IN_ONE = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems")
_IN_LIST = ("prefixItems", "items", *_TOGETHER)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")

Schema = JsonObject


def closed(schema: Any) -> Any:
    """A copy of `schema` in which objects that name properties forbid all others.

    Raises RecursionError.
    """
    return _Closing(schema).copy(schema)


def circular_reference(schema: Any) -> str:
    """The first `$ref` of a schema that leads only back to itself; empty if there is none.

    Raises RecursionError.
    """
    document = _Closing(schema)
    for one in _all(schema):
        if document.is_circular(one):
            return str(one["$ref"])
    return ""


def is_compact(schema: Any) -> bool:
    """Whether the JSON has one space after each comma and colon, and no other white space.

    The key `x-guidance` is that of llguidance.
    """
    if not isinstance(schema, dict):
        return False
    options = schema.get("x-guidance")
    return isinstance(options, dict) and options.get("whitespace_flexible") is False


class _Closing:
    """One document. First it finds all schemas that must stay open, then it makes the copy."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: set[int] = set()  # ids of original schemas that stay unchanged
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
                result[key] = list(map(self.copy, schema[key]))
        for key in _BY_NAME:
            if isinstance(schema.get(key), dict):
                result[key] = dict(schema[key])
                for name, one in schema[key].items():
                    result[key][name] = self.copy(one)
        if _is_silent(schema) and id(schema) not in self._open:
            result["additionalProperties"] = False
        return result

    def is_circular(self, schema: Schema) -> bool:
        target = self._target(schema)
        if target is None:
            return False
        return any(part is schema for part in self._parts(target, ("allOf",)))

    def _leave_open(self, schema: Schema) -> None:
        """Note the schemas that name properties of an object for which other schemas do, too."""
        self._leave_conditions_open(schema)
        sources = self._sources(schema)
        required = self._required_together(schema)
        for source in sources:
            for naming in source:
                # Several sources: each would forbid the properties of the others. One source: when
                # closed, it must still match some value.
                if len(sources) > 1 or _needs_others(naming, required):
                    self._open.add(id(naming))

    def _leave_conditions_open(self, schema: Schema) -> None:
        for condition in _conditions(schema):
            # A closed condition would match fewer values, and its negation more.
            for naming in self._naming(condition):
                self._open.add(id(naming))
            if any(map(_names_properties, _all(condition))):
                self._open.add(id(schema))

    def _sources(self, schema: Schema) -> list[list[Schema]]:
        """The groups of schemas that name properties of the same object; one schema of each group
        applies."""
        sources: list[list[Schema]] = []
        if _names_properties(schema):
            sources.append([schema])
        sources += map(self._naming, _schemas_in(schema, "allOf"))
        # Only one of these applies in addition to the rest: together they are one source.
        for key in ("anyOf", "oneOf"):
            choices: list[Schema] = []
            for one in _schemas_in(schema, key):
                choices += self._naming(one)
            sources.append(choices)
        target = self._target(schema)
        if target:
            sources.append(self._naming(target))
        return [source for source in sources if source]

    def _required_together(self, schema: Schema) -> set[str]:
        """The properties that the object must have, whatever choice is made."""
        required: set[str] = set()
        for part in self._parts(schema, ("allOf",)):
            required.update(_required(part))
        for part in self._parts(schema, _TOGETHER):
            if not _names_properties(part):
                required.update(_required(part))
        return required

    def _naming(self, schema: Schema) -> list[Schema]:
        """Those of `schema` and the schemas that apply together with it that name properties."""
        parts = self._parts(schema, _TOGETHER, with_conditions=True)
        return [part for part in parts if _names_properties(part)]

    def _parts(
        self,
        schema: Schema,
        keys: tuple[str, ...],
        *,
        with_conditions: bool = False,
    ) -> list[Schema]:
        """`schema` and all schemas for the same value: below `keys`, and targets of `$ref`."""
        # By identity, because a schema may refer to itself.
        found: dict[int, Schema] = {}
        pending = [schema]
        while pending:
            one = pending.pop()
            if id(one) in found:
                continue
            found[id(one)] = one
            for key in keys:
                pending += _schemas_in(one, key)
            if with_conditions:
                pending += _conditions(one)
            target = self._target(one)
            if target:
                pending.append(target)
        return list(found.values())

    def _target(self, schema: Schema) -> Schema | None:
        """The target of its `$ref` in this document."""
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            return None
        found = self._root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")  # RFC 6901
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict):
                found = found.get(key)
            else:
                return None
        return found if isinstance(found, dict) else None


def _names_properties(schema: Schema) -> bool:
    return any(isinstance(schema.get(key), dict) for key in _NAMING)


def _is_silent(schema: Schema) -> bool:
    """Whether the schema names properties and does not say whether others are allowed."""
    return _names_properties(schema) and not any(key in schema for key in _SAYS_IT)


def _needs_others(schema: Schema, required: set[str]) -> bool:
    """Whether every valid value needs properties that the schema does not name."""
    if isinstance(schema.get("patternProperties"), dict):
        return False
    named = schema["properties"]
    if not required <= named.keys():
        return True
    least = schema.get("minProperties")
    return isinstance(least, int) and least > len(named)


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    if not isinstance(names, list):
        return []
    return [name for name in names if isinstance(name, str)]


def _schemas_in(schema: Schema, key: str) -> list[Schema]:
    """The schemas in the list below `key`."""
    return _only_schemas(schema.get(key) or ())


def _conditions(schema: Schema) -> list[Schema]:
    values = [schema.get(key) for key in _CONDITIONS]
    dependent = schema.get("dependentSchemas")
    if isinstance(dependent, dict):
        values += dependent.values()
    return _only_schemas(values)


def _only_schemas(values: Iterable[Any]) -> list[Schema]:
    return [value for value in values if isinstance(value, dict)]


def _all(schema: Any) -> Iterator[Schema]:
    """`schema` and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in (*_IN_ONE, *_CONDITIONS):
        yield from _all(schema.get(key))
    for key in _IN_LIST:
        value = schema.get(key)
        if isinstance(value, list):
            for one in value:
                yield from _all(one)
    for key in (*_BY_NAME, "dependentSchemas"):
        value = schema.get(key)
        if isinstance(value, dict):
            for one in value.values():
                yield from _all(one)
