from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.grammar.closed import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
SHUT_A, SHUT_B = ({**one, "additionalProperties": False} for one in (A, B))


def test_an_object_has_the_properties_that_its_schema_names() -> None:
    assert closed(A) == SHUT_A
    assert closed({"type": "object", "properties": {}}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "unevaluatedProperties": True},
        {**A, "required": ["c"]},
        {"allOf": [A], "required": ["c"]},
        {**A, "minProperties": 2},
        {"not": A},
        {"const": A},
        {"enum": [A]},
        {"type": "object", "default": A},
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"type": "object"}]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/b"}, A], "$defs": {"b": B}},
        {"oneOf": [{"allOf": [A, B]}]},
        {**A, "if": A, "then": B},
        {**A, "dependentSchemas": {"a": B}},
    ],
)
def test_what_says_it_itself_or_is_only_a_part_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    ("schema", "shut"),
    [
        ({"items": A}, {"items": SHUT_A}),
        ({"prefixItems": [A]}, {"prefixItems": [SHUT_A]}),
        ({"anyOf": [A, B]}, {"anyOf": [SHUT_A, SHUT_B]}),
        ({"oneOf": [A, {"type": "null"}]}, {"oneOf": [SHUT_A, {"type": "null"}]}),
        ({"allOf": [A], "title": "t"}, {"allOf": [SHUT_A], "title": "t"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": SHUT_A}}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": SHUT_A}, "additionalProperties": False},
        ),
        ({**A, "anyOf": [{"required": ["a"]}]}, {**SHUT_A, "anyOf": [{"required": ["a"]}]}),
        ({"additionalProperties": A}, {"additionalProperties": SHUT_A}),
        (
            {"patternProperties": {"x": A}},
            {"patternProperties": {"x": SHUT_A}, "additionalProperties": False},
        ),
    ],
)
def test_schemas_within_schemas_are_closed(schema: Any, shut: Any) -> None:
    assert closed(schema) == shut


def test_references_in_a_circle_end() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert closed(node) == {**node, "additionalProperties": False}
    assert closed({"$ref": "#"}) == {"$ref": "#"}


def test_a_schema_is_not_changed_in_place() -> None:
    schema = json.loads(json.dumps({"items": [A], "$defs": {"b": B}}))
    before = json.dumps(schema)
    closed(schema)
    assert json.dumps(schema) == before


_LEAF = st.sampled_from(
    [A, B, {"type": "integer"}, {"required": ["a"]}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
)


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    properties = st.fixed_dictionaries({}, optional={"a": inner, "c": inner})
    keys = {"allOf": several, "anyOf": several, "items": inner, "properties": properties}
    return st.fixed_dictionaries({}, optional=keys)


_VALUES = [
    1,
    {},
    {"a": 1},
    {"b": 2},
    {"a": 1, "b": 2},
    {"c": {"a": 1}},
    {"a": {"b": 2}, "c": 3},
    [{"a": 1}],
    [[1]],
]


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@given(schema=st.recursive(_LEAF, _grown, max_leaves=6))
@settings(max_examples=150, deadline=None)
def test_less_is_allowed_than_before_but_never_nothing(schema: Any) -> None:
    whole = {**schema, "$defs": {"a": A, "b": B}}
    before = [value for value in _VALUES if is_valid(whole, value)]
    after = [value for value in _VALUES if is_valid(closed(whole), value)]
    assert all(value in before for value in after)
    assert bool(after) == bool(before)
