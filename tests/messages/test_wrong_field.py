"""Errors about JSON of another type name the field, its value and what is allowed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from weft.messages.wrong_field import WrongField, converted_field, wrong_field


class Call(msgspec.Struct, tag="call"):
    id: int


class Text(msgspec.Struct, tag="text"):
    id: int


class Said(msgspec.Struct):
    role: Literal["user", "tool"]
    parts: list[Call | Text] = []


class Body(msgspec.Struct):
    messages: list[Said] | str
    max_tokens: int | None = None
    temperature: float = 1.0
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] = {}
    bias_of: dict[int, float] = {}
    pair: tuple[int, int] = (1, 2)
    stream: bool | None = None


@pytest.mark.parametrize(
    ("fields", "name", "text"),
    [
        (
            {"max_tokens": "many"},
            "max_tokens",
            "max_tokens is 'many'; a whole number or null is needed, "
            "0 to 2,147,483,647 are allowed, or -1",
        ),
        (
            {"temperature": None},
            "temperature",
            "temperature is null; a number is needed, 0 to 2 are allowed",
        ),
        ({"stop": 3}, "stop", "stop is 3; a text, a list or null is needed"),
        ({"stop": ["a", True]}, "stop[1]", "stop[1] is true; a text is needed"),
        (
            {"logit_bias": {"1": 1, "2": "x"}},
            "logit_bias['2']",
            "logit_bias['2'] is 'x'; a number is needed",
        ),
        ({"bias_of": {"x": 1}}, "bias_of", "a key of bias_of is a text; a whole number is needed"),
        ({"pair": [1]}, "pair", "pair is [1]; a list of length 2 is needed"),
        ({"messages": 5}, "messages", "messages is 5; a text or a list is needed"),
        ({"messages": [{}]}, "messages[0].role", "messages[0].role is missing; it is required"),
        (
            {"messages": [{"role": "boss"}]},
            "messages[0].role",
            "messages[0].role is 'boss'; tool, user are allowed",
        ),
        (
            {"messages": [{"role": 3}]},
            "messages[0].role",
            "messages[0].role is 3; tool, user are allowed",
        ),
        (
            {"messages": [{"role": "user", "parts": [{"type": "image"}]}]},
            "messages[0].parts[0].type",
            "messages[0].parts[0].type is 'image'; call, text are allowed",
        ),
        (
            {"stop": {"a": [1] * 50}},
            "stop",
            'stop is {"a":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,...; a text, a list or null is needed',
        ),
    ],
)
def test_field_value_and_what_is_allowed_are_named(
    fields: dict[str, Any], name: str, text: str
) -> None:
    body = {"messages": "x", **fields}
    raw = msgspec.json.encode(body)
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(raw, type=Body)
    assert wrong_field(caught.value, raw, Body) == WrongField(name, text)
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Body)
    if name not in ("bias_of", "pair"):  # other words of msgspec
        assert converted_field(caught.value, body, Body) == WrongField(name, text)


@pytest.mark.parametrize(
    ("raw", "name", "text"),
    [
        (b"{}", "messages", "messages is missing; it is required"),
        (b" [1,\n2]", "", "the body is [1, 2]; an object is needed"),
        (b"null", "", "the body is null; an object is needed"),
        (b'{"messages": 1e999}', "messages", "messages is 1e999; a smaller number is needed"),
        (
            b'{"messages": "x", "temperature": 1e999}',
            "temperature",
            "temperature is 1e999; a smaller number is needed, 0 to 2 are allowed",
        ),
        (
            b'{"messages": "x", "stream": 1}',
            "stream",
            "stream is 1; true, false or null is needed",
        ),
    ],
)
def test_a_whole_body_may_be_wrong(raw: bytes, name: str, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(raw, type=Body)
    assert wrong_field(caught.value, raw, Body) == WrongField(name, text)


def test_a_value_inside_of_a_field_is_named_from_that_field_on() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'[[1, "x"]]', type=list[list[int]])
    found = wrong_field(caught.value, b'[[1, "x"]]', within="input")
    assert found == WrongField("input[0][1]", "input[0][1] is 'x'; a whole number is needed")
