"""The bodies of /openapi.json and the server agree: each field of each body takes what its schema
allows, at every bound, and refuses what the schema does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from weft.config.limits import Limits
from weft.server.app import OPERATIONS
from weft.server.body import _decoded
from weft.server.errors import ApiError
from weft.server.limits import BOUNDS
from weft.server.openapi import openapi_document

Schema = dict[str, Any]
LIMITS = Limits(**dict.fromkeys((bound.limit for bound in BOUNDS), 5))  # else values are large
COMPONENTS: Schema = openapi_document(OPERATIONS, "0", LIMITS)["components"]
SCHEMAS: Schema = COMPONENTS["schemas"]
BODIES = sorted(
    {one.body for one in OPERATIONS if one.body is not None}, key=lambda one: one.__name__
)
ANYTHING: tuple[Any, ...] = (
    None,
    True,
    "x",
    "",
    0,
    -1,
    1,
    1.5,
    [],
    {},
    [1],
    ["x"],
    [None],
    [[]],
    [{}],
    {"1": 1},
)
VOCAB_SIZE = 2**31  # the schema does not say which ids the model has


def resolved(schema: Schema) -> Schema:
    if "$ref" in schema:
        return SCHEMAS[str(schema["$ref"]).rpartition("/")[2]]
    return schema


def plainest(schema: Schema) -> Any:
    """A value that the schema allows."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return plainest(schema["anyOf"][0])
    match schema.get("type"):
        case "object":
            needed = schema.get("required", ())
            return {name: plainest(schema["properties"][name]) for name in needed}
        case "array":
            return []
        case "string":
            return "x"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
    return schema.get("const", schema.get("enum", [None])[0])


def edges(schema: Schema, inside: tuple[str, ...] = ()) -> Iterator[Any]:
    """Values at the bounds of a schema, and just outside of them."""
    if schema.get("$ref") in inside:
        return
    inside = (*inside, schema.get("$ref", ""))
    schema = resolved(schema)
    yield from (*schema.get("enum", ()), schema.get("const"))
    for one in schema.get("anyOf", ()):
        yield from edges(one, inside)
    for keyword in ("minimum", "exclusiveMinimum", "maximum"):
        for distance in (-1, -0.001, 0, 0.001, 1):
            if keyword in schema and (schema["type"] == "number" or distance in (-1, 0, 1)):
                yield schema[keyword] + distance
    for distance in (-1, 0, 1):
        for keyword in schema.keys() & {"minLength", "maxLength"}:
            yield "x" * (schema[keyword] + distance)
        if "maxProperties" in schema:
            yield {str(id): 1 for id in range(schema["maxProperties"] + distance)}
        if "maxItems" in schema:
            yield [plainest(schema["items"])] * (schema["maxItems"] + distance)
    if isinstance(schema.get("items"), dict):
        yield from ([one] for one in edges(schema["items"], inside))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from ({"1": one} for one in edges(schema["additionalProperties"], inside))
    if "properties" in schema:
        right = plainest(schema)
        yield from ({key: right[key] for key in right if key != name} for name in right)
        for name, field in schema["properties"].items():
            yield from ({**right, name: one} for one in edges(field, inside))


@pytest.mark.parametrize("body", BODIES, ids=lambda one: one.__name__)
def test_every_field_takes_what_its_schema_allows(body: type[msgspec.Struct]) -> None:
    schema = SCHEMAS[body.__name__]
    right = plainest(schema)
    for name, field in schema["properties"].items():
        validator = jsonschema.Draft202012Validator({**field, "components": COMPONENTS})
        tried = {json.dumps(value): value for value in (*ANYTHING, *edges(field))}
        for text, value in tried.items():
            content = json.dumps({**right, name: value}).encode()
            try:
                _decoded(LIMITS, VOCAB_SIZE, content, body)
                refusal = ""
            except ApiError as exc:
                refusal = exc.message
            assert validator.is_valid(value) is not bool(refusal), f"{name}: {text:.80}: {refusal}"
    for name in schema.get("required", ()):
        content = json.dumps({key: right[key] for key in right if key != name}).encode()
        with pytest.raises(ApiError, match=name):
            _decoded(LIMITS, VOCAB_SIZE, content, body)


def test_limits_that_an_operator_sets_are_in_the_document() -> None:
    document = openapi_document(OPERATIONS, "0", Limits(max_n=3, max_stop_strings=2))
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert fields["stop"]["anyOf"][1]["maxItems"] == 2
    assert fields["max_completion_tokens"]["anyOf"][0]["anyOf"][0] == {"const": -1}


def test_answers_have_no_ranges_of_fields_of_bodies() -> None:
    assert SCHEMAS["Duration"]["properties"]["seconds"] == {"type": "number"}
