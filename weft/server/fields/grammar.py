"""What a request says of the form of its answer, in the spellings of OpenAI, vLLM, SGLang and llama.cpp: at most one.

OpenAI has response_format; vLLM has structured_outputs, and before that guided_json, guided_regex, guided_choice and
guided_grammar; SGLang has json_schema, regex, ebnf and structural_tag; llama.cpp has grammar. The table stands in
docs/guides/structured-output.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import msgspec

from weft.messages.sampling import Grammar
from weft.server.errors import ApiError

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_SHOWN = 64  # characters of a wrong value that are repeated


class Spelling(NamedTuple):
    """How one field says it."""

    field: str
    read: Callable[[str, Any], Grammar | None]  # of the field's name for messages, and its value


def json_schema(param: str, value: Any, *, strict: bool = False) -> Grammar:
    """A schema as JSON or as text; true and false are schemas, too."""
    if isinstance(value, str):
        value = _decoded(param, value)
    if not isinstance(value, dict | bool):
        raise _wrong(param, value, "a JSON schema")
    return Grammar("json_schema", msgspec.json.encode(value).decode(), strict)


def json_object(param: str, value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise _wrong(param, value, "true")
    return json_schema(param, ANY_OBJECT) if value else None


def regex(param: str, value: Any) -> Grammar:
    return Grammar("regex", _text(param, value, "a regular expression"))


def ebnf(param: str, value: Any) -> Grammar:
    return Grammar("ebnf", _text(param, value, "a grammar"))


def choice(param: str, value: Any) -> Grammar:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(one, str) and one for one in value)
    ):
        raise _wrong(param, value, "a list of strings, none of them empty,")
    return Grammar("choice", msgspec.json.encode(value).decode())


class Structure(msgspec.Struct, kw_only=True):
    begin: str
    end: str
    schema_: dict[str, Any] = msgspec.field(name="schema")


class StructuralTag(msgspec.Struct, kw_only=True):
    structures: list[Structure]
    triggers: list[str]


def structural_tag(param: str, value: Any) -> Grammar:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or {"format": {...}}, as JSON or as text."""
    if isinstance(value, str):
        value = _decoded(param, value)
    if isinstance(value, dict) and "format" in value:
        if not isinstance(value["format"], dict) or not isinstance(
            value["format"].get("type"), str
        ):
            raise _wrong(f"{param}.format", value["format"], "an object with a type")
        return Grammar("structural_tag", msgspec.json.encode({"format": value["format"]}).decode())
    try:
        tag = msgspec.convert(value, StructuralTag)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ApiError(400, f"{param} has no structures with triggers: {exc}", param=param) from exc
    if not tag.structures or not all(
        one.begin.startswith(tuple(filter(None, tag.triggers))) for one in tag.structures
    ):
        message = (
            f"{param}: there must be a structure, and each must begin with one of the triggers"
        )
        raise ApiError(400, message, param=param)
    return Grammar("structural_tag", msgspec.json.encode(tag).decode())


SPELLINGS = (
    Spelling("json_schema", json_schema),
    Spelling("regex", regex),
    Spelling("ebnf", ebnf),
    Spelling("grammar", ebnf),
    Spelling("choice", choice),
    Spelling("structural_tag", structural_tag),
    Spelling("guided_json", json_schema),
    Spelling("guided_json_object", json_object),
    Spelling("guided_regex", regex),
    Spelling("guided_choice", choice),
    Spelling("guided_grammar", ebnf),
)
_INSIDE = (  # of structured_outputs
    Spelling("json", json_schema),
    Spelling("regex", regex),
    Spelling("choice", choice),
    Spelling("grammar", ebnf),
    Spelling("json_object", json_object),
    Spelling("structural_tag", structural_tag),
)


def grammar_of(body: msgspec.Struct) -> Grammar | None:
    """The one grammar that the fields of `body` give. Raises `ApiError` for a wrong one, and for two."""
    values = {name: getattr(body, name) for name in _fields(type(body))}
    found = _found(SPELLINGS, values, "")
    if values.get("response_format") is not None:
        found += [("response_format", one) for one in _response_format(values["response_format"])]
    outputs = values.get("structured_outputs")
    if outputs is not None:
        found += _structured_outputs(outputs)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(
            400, f"{names} are given; only one may say what the answer must be", param=found[1][0]
        )
    return found[0][1] if found else None


@cache
def _fields(body: type[msgspec.Struct]) -> tuple[str, ...]:
    """Those of its fields that may give a grammar: a few of many."""
    names = {*(spelling.field for spelling in SPELLINGS), "response_format", "structured_outputs"}
    return tuple(name for name in body.__struct_fields__ if name in names)


def _found(
    spellings: tuple[Spelling, ...], values: dict[str, Any], prefix: str
) -> list[tuple[str, Grammar]]:
    found = []
    for name, read in spellings:
        if values.get(name) is not None:
            grammar = read(prefix + name, values[name])
            if grammar is not None:
                found.append((prefix + name, grammar))
    return found


def _structured_outputs(outputs: Any) -> list[tuple[str, Grammar]]:
    name = "structured_outputs"
    if not isinstance(outputs, dict):
        raise _wrong(name, outputs, "an object")
    given = {key for key, value in outputs.items() if value is not None}
    unknown = sorted(given - {one.field for one in _INSIDE} - {"strict"})
    if unknown:
        known = ", ".join(one.field for one in _INSIDE)
        raise ApiError(
            400, f"{name} has {unknown[0][:MAX_SHOWN]!r}; there are {known} and strict", param=name
        )
    found = _found(_INSIDE, outputs, f"{name}.")
    if outputs.get("strict") is True:
        found = [(key, msgspec.structs.replace(grammar, strict=True)) for key, grammar in found]
    return found


def _response_format(given: Any) -> list[Grammar]:
    name = "response_format"
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise _wrong(name, given, "an object with a type")
    match given["type"]:
        case "text":
            return []
        case "json_object":
            return [json_schema(f"{name}.schema", given.get("schema") or ANY_OBJECT)]
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
            if schema is None:
                raise ApiError(
                    400, f"{name}.json_schema has no schema", param=f"{name}.json_schema.schema"
                )
            strict = isinstance(inner, dict) and inner.get("strict") is True
            return [json_schema(f"{name}.json_schema.schema", schema, strict=strict)]
        case "structural_tag":
            return [
                structural_tag(name, {key: value for key, value in given.items() if key != "type"})
            ]
    kinds = "text, json_object, json_schema and structural_tag"
    raise ApiError(
        400,
        f"{name}.type is {given['type'][:MAX_SHOWN]!r}; there are {kinds}",
        param=f"{name}.type",
    )


def _decoded(param: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ApiError(400, f"{param} is not valid JSON: {exc}", param=param) from exc


def _text(param: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(param, value, what)
    return value


def _wrong(param: str, value: Any, what: str) -> ApiError:
    return ApiError(400, f"{param} is {str(value)[:MAX_SHOWN]!r}; {what} is needed", param=param)
