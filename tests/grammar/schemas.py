"""JSON schemas at random, each with a way to make instances of it, and a way to spoil these.

They have every keyword of draft 2020-12 that llguidance enforces; it warns of the others
(`test_llg.py`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

WORDS = ["a", "id", "größe", "first name", "x-y", 'quo"te', "emoji 😀", "v2", "list", "nested"]
LETTERS = 'abcxyz 0189_-äß😀"\\/\n'
FORMATS = {
    "date": "2024-02-29",
    "time": "12:30:05Z",
    "date-time": "2024-02-29T12:30:05Z",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.168.0.1",
    "email": "a.b@example.org",
    "duration": "P1DT12H",
    "hostname": "www.example.org",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/a?b=c#d",
}


class Made(NamedTuple):
    schema: dict[str, Any]
    make: Callable[[], Any]  # another instance


def random_schema(rng: random.Random, depth: int = 3) -> Made:
    """A schema whose instances are finite: strings and arrays have a greatest length."""
    kinds = [_string, _pattern, _format, _integer, _number, _boolean, _null, _enum, _const]
    if depth:
        kinds += 3 * [_object, _array] + [_tuple, _any_of, _one_of, _all_of, _ref, _chain, _types]
        kinds += [_named_by_pattern, _more_properties, _pair_and_rest, _annotated]
    return rng.choice(kinds)(rng, depth - 1)


def spoiled(rng: random.Random, value: Any) -> Any:
    """The value with something changed somewhere; perhaps it is still valid."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        match rng.randrange(3):
            case 0:
                del value[key]
            case 1:
                value["unknown " + key] = value[key]
            case _:
                value[key] = spoiled(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        match rng.randrange(3):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [
                    *value,
                    value[place],
                    value[place],
                    value[place],
                    value[place],
                    value[place],
                ]
            case _:
                value[place] = spoiled(rng, value[place])
                return value
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice([value + "?", value[:-1], value * 9])
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice([value + 1_000, -value - 1_000, value + 0.5])
    return rng.choice([None, True, -(10**6), 0.125, "other", [], {}, [None], {"zz": 1}])


def _string(rng: random.Random, depth: int) -> Made:
    low = rng.choice([0, 0, 1, 3])
    high = low + rng.randrange(1, 12)
    schema = {"type": "string", "maxLength": high} | ({"minLength": low} if low else {})
    return Made(schema, lambda: "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high))))


def _pattern(rng: random.Random, depth: int) -> Made:
    kinds: list[tuple[str, Callable[[], str]]] = [
        ("^[a-f]{2,4}$", lambda: "".join(rng.choice("abcdef") for _ in range(rng.randint(2, 4)))),
        (r"^\d{3}-[A-Z]$", lambda: f"{rng.randrange(1000):03d}-{rng.choice('ABZ')}"),
        ("^(red|green|blue)( light)?$", lambda: rng.choice(["red", "green light", "blue"])),
    ]
    pattern, make = rng.choice(kinds)
    return Made({"type": "string", "pattern": pattern}, make)


def _format(rng: random.Random, depth: int) -> Made:
    name = rng.choice(list(FORMATS))
    return Made({"type": "string", "format": name}, lambda: FORMATS[name])


def _integer(rng: random.Random, depth: int) -> Made:
    low = rng.randrange(-50, 50)
    high = low + rng.randrange(1, 2_000)
    match rng.randrange(4):
        case 0:
            return Made({"type": "integer"}, lambda: rng.randrange(-(10**9), 10**9))
        case 1:
            return Made(
                {"type": "integer", "minimum": low, "maximum": high}, lambda: rng.randint(low, high)
            )
        case 2:
            schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 1}
            return Made(schema, lambda: rng.randint(low + 1, high))
        case _:
            return Made(
                {"type": "integer", "multipleOf": 5, "minimum": 0}, lambda: 5 * rng.randrange(100)
            )


def _number(rng: random.Random, depth: int) -> Made:
    low = rng.randrange(-5, 5)
    match rng.randrange(4):
        case 0:
            return Made({"type": "number"}, lambda: rng.choice([0, -1.5, 3.25, 1e9, 7]))
        case 1:
            schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 10}
            return Made(schema, lambda: low + rng.randrange(1, 80) / 8)
        case 2:
            return Made(
                {"type": "number", "multipleOf": 0.5, "minimum": 0}, lambda: rng.randrange(99) / 2
            )
        case _:
            bounds = {"minimum": low, "maximum": low + 10}
            return Made({"type": "number", **bounds}, lambda: low + rng.randrange(0, 80) / 8)


def _boolean(rng: random.Random, depth: int) -> Made:
    return Made({"type": "boolean"}, lambda: rng.random() < 0.5)


def _null(rng: random.Random, depth: int) -> Made:
    return Made({"type": "null"}, lambda: None)


def _enum(rng: random.Random, depth: int) -> Made:
    values: list[Any] = rng.sample(
        [*WORDS, 1, -2.5, None, True, ["x", 1], {"k": "v"}], rng.randrange(1, 6)
    )
    return Made({"enum": values}, lambda: rng.choice(values))


def _const(rng: random.Random, depth: int) -> Made:
    value = rng.choice([*WORDS, 17, {"deep": [1, {"er": None}]}])
    return Made({"const": value}, lambda: value)


def _object(rng: random.Random, depth: int) -> Made:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    made = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: one.schema for name, one in made.items()},
    }
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False

    def make() -> dict[str, Any]:
        return {
            name: one.make() for name, one in made.items() if name in required or rng.random() < 0.5
        }

    return Made(schema, make)


def _array(rng: random.Random, depth: int) -> Made:
    item = random_schema(rng, depth)
    low = rng.randrange(0, 3)
    high = low + rng.randrange(0, 4)
    schema = {"type": "array", "items": item.schema, "minItems": low, "maxItems": high}
    return Made(schema, lambda: [item.make() for _ in range(rng.randint(low, high))])


def _tuple(rng: random.Random, depth: int) -> Made:
    made = [random_schema(rng, depth) for _ in range(rng.randrange(1, 4))]
    size = len(made)
    schema = {
        "type": "array",
        "prefixItems": [one.schema for one in made],
        "items": False,
        "minItems": size,
    }
    return Made(schema, lambda: [one.make() for one in made])


def _any_of(rng: random.Random, depth: int) -> Made:
    made = [random_schema(rng, depth) for _ in range(rng.randrange(2, 4))]
    return Made({"anyOf": [one.schema for one in made]}, lambda: rng.choice(made).make())


def _one_of(rng: random.Random, depth: int) -> Made:
    """Objects that a constant tells apart: no instance fits two."""
    made = [random_schema(rng, depth) for _ in range(rng.randrange(2, 4))]
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"kind {i}"}, "value": one.schema},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for i, one in enumerate(made)
    ]

    def make() -> dict[str, Any]:
        number = rng.randrange(len(made))
        return {"kind": f"kind {number}", "value": made[number].make()}

    return Made({"oneOf": options}, make)


def _named_by_pattern(rng: random.Random, depth: int) -> Made:
    one = random_schema(rng, depth)
    other = random_schema(rng, depth)
    patterns = {"^n[0-9]$": one.schema, "^m[a-c]{1,2}$": other.schema}
    schema = {
        "type": "object",
        "patternProperties": patterns,
        "additionalProperties": False,
        "maxProperties": 2,
    }
    return Made(schema, lambda: {f"n{rng.randrange(10)}": one.make(), "mab": other.make()})


def _more_properties(rng: random.Random, depth: int) -> Made:
    """Properties of any name, so many of them."""
    one = random_schema(rng, depth)
    low = rng.randrange(0, 2)
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": one.schema,
        "maxProperties": low + 2,
    }
    if low:
        schema["minProperties"] = low
    return Made(
        schema, lambda: {name: one.make() for name in rng.sample(WORDS, rng.randint(low, low + 2))}
    )


def _pair_and_rest(rng: random.Random, depth: int) -> Made:
    first = random_schema(rng, depth)
    rest = random_schema(rng, depth)
    schema = {
        "type": "array",
        "prefixItems": [first.schema],
        "items": rest.schema,
        "minItems": 1,
        "maxItems": 3,
    }
    return Made(schema, lambda: [first.make(), *(rest.make() for _ in range(rng.randrange(3)))])


def _annotated(rng: random.Random, depth: int) -> Made:
    """With what says nothing about the instance."""
    made = random_schema(rng, depth)
    words = {
        "title": "t",
        "description": "d",
        "$comment": "c",
        "deprecated": True,
        "readOnly": False,
        "examples": [1],
    }
    return Made(made.schema | words, made.make)


def _chain(rng: random.Random, depth: int) -> Made:
    """Objects that refer to themselves; like `_ref` only as the whole."""
    if depth < 2:
        return _null(rng, depth)
    node: dict[str, Any] = {
        "$anchor": "node",
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"type": "null"}, {"$ref": rng.choice(["#node", "#/$defs/node"])}]}
        },
        "required": ["next"],
        "additionalProperties": False,
    }

    def make() -> dict[str, Any]:
        value = None
        for _ in range(rng.randrange(1, 4)):
            value = {"next": value}
        assert value is not None
        return value

    return Made({"$defs": {"node": node}, "$ref": "#/$defs/node"}, make)


def _all_of(rng: random.Random, depth: int) -> Made:
    low = rng.randrange(0, 20)
    schema = {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 30}]}
    return Made(schema, lambda: rng.randint(low, low + 30))


def _ref(rng: random.Random, depth: int) -> Made:
    """A list of lists, by reference. References cannot be nested: it must be the whole schema."""
    name = rng.choice(["node", "tree"])
    schema = {
        "$defs": {
            name: {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
        },
        "type": "object",
        "properties": {"left": {"$ref": f"#/$defs/{name}"}, "right": {"$ref": f"#/$defs/{name}"}},
        "required": ["left"],
        "additionalProperties": False,
    }
    schema["$defs"][name]["additionalProperties"] = False  # type: ignore[index]
    if depth < 2:  # not the whole: without references
        return _boolean(rng, depth)
    return Made(schema, lambda: {"left": {"v": rng.randrange(9)}, "right": {"v": -1}})


def _types(rng: random.Random, depth: int) -> Made:
    schema = {"type": ["string", "null"], "maxLength": 5}
    return Made(schema, lambda: rng.choice([None, "abc", ""]))
