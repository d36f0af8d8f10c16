"""The fields of a request that constrain the form of its answer; at most one may be given.

OpenAI has response_format; vLLM has structured_outputs, and earlier guided_json, guided_regex,
guided_choice and guided_grammar; SGLang has json_schema, regex, ebnf and structural_tag; llama.cpp
has grammar. docs/guides/structured-output.md has the same table for users. This module reads the
fields and checks their form; the engine's compiler decides whether a grammar can be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from weft.json_types import JsonObject
from weft.messages.sampling import Grammar
from weft.messages.wrong_field import converted_field
from weft.server.errors import ApiError

ANY_OBJECT: JsonObject = {"type": "object"}
RESPONSE_FORMAT = "response_format"
MAX_SHOWN = 64  # characters of a wrong value that a message repeats


class GrammarField(NamedTuple):
    """One field that contains a grammar."""

    name: str
    read: Callable[[str, Any], Grammar | None]  # (name for messages, value)


def json_schema(
    param: str,
    value: Any,
    *,
    strict: bool = False,
) -> Grammar:
    """A schema as JSON or as text; true and false are valid schemas."""
    if isinstance(value, str):
        value = _decoded(param, value)
    if not isinstance(value, dict | bool):
        raise _wrong(param, value, "a JSON schema")
    return Grammar("json_schema", _as_text(value), strict)


def json_object(param: str, value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise _wrong(param, value, "true")
    return json_schema(param, ANY_OBJECT) if value else None


def regex(param: str, value: Any) -> Grammar:
    return Grammar("regex", _text(param, value, "a regular expression"))


def ebnf(param: str, value: Any) -> Grammar:
    return Grammar("ebnf", _text(param, value, "a grammar"))


def choice(param: str, value: Any) -> Grammar:
    needed = "a list of strings, none of them empty,"
    if not isinstance(value, list) or not value:
        raise _wrong(param, value, needed)
    for text in value:
        if not isinstance(text, str) or not text:
            raise _wrong(param, value, needed)
    return Grammar("choice", _as_text(value))


class TagStructure(msgspec.Struct, kw_only=True):
    """A part of the output between two marks, with a JSON schema."""

    begin: str
    end: str
    schema_: JsonObject = msgspec.field(name="schema")


class StructuralTag(msgspec.Struct, kw_only=True):
    """Free text in which a trigger starts one of the structures."""

    structures: list[TagStructure]
    triggers: list[str]


def structural_tag(param: str, value: Any) -> Grammar:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or {"format": {...}}.

    As JSON or as text.
    """
    if isinstance(value, str):
        value = _decoded(param, value)
    if isinstance(value, dict) and "format" in value:
        format = value["format"]
        if not _has_type(format):
            raise _wrong(f"{param}.format", format, "an object with a type")
        only_format = {"format": format}
        return Grammar("structural_tag", _as_text(only_format))
    try:
        tag = msgspec.convert(value, StructuralTag)
    except (msgspec.ValidationError, RecursionError) as exc:
        message = f"{param} has no structures with triggers: {_fault(exc, value, param)}"
        raise ApiError(400, message, param=param) from exc
    triggers = tuple(filter(None, tag.triggers))
    # Free text ends only at a trigger: a structure with another beginning could never start.
    is_right = bool(tag.structures)
    for structure in tag.structures:
        is_right = is_right and structure.begin.startswith(triggers)
    if not is_right:
        message = (
            f"{param}: there must be a structure, and each must begin with one of the triggers"
        )
        raise ApiError(400, message, param=param)
    return Grammar("structural_tag", _as_text(tag))


def _fault(exc: Exception, value: Any, param: str) -> str:
    if isinstance(exc, msgspec.ValidationError):
        return converted_field(exc, value, StructuralTag, param).text
    return str(exc)


_PLAIN = (
    GrammarField("json_schema", json_schema),
    GrammarField("regex", regex),
    GrammarField("ebnf", ebnf),
    GrammarField("grammar", ebnf),
    GrammarField("choice", choice),
    GrammarField("structural_tag", structural_tag),
    GrammarField("guided_json", json_schema),
    GrammarField("guided_json_object", json_object),
    GrammarField("guided_regex", regex),
    GrammarField("guided_choice", choice),
    GrammarField("guided_grammar", ebnf),
)
_INSIDE = (  # members of structured_outputs
    GrammarField("json", json_schema),
    GrammarField("regex", regex),
    GrammarField("choice", choice),
    GrammarField("grammar", ebnf),
    GrammarField("json_object", json_object),
    GrammarField("structural_tag", structural_tag),
)
GRAMMAR_FIELDS = (*(field.name for field in _PLAIN), "response_format", "structured_outputs")


class NamedGrammar(NamedTuple):
    """A grammar, and the name of its field."""

    name: str
    grammar: Grammar


def grammar_of(body: msgspec.Struct) -> Grammar | None:
    """The one grammar in the fields of `body`.

    Raises `ApiError` for an invalid grammar, and for two grammars.
    """
    values: JsonObject = {}
    for name in GRAMMAR_FIELDS:
        values[name] = getattr(body, name, None)
    found = _found(_PLAIN, values, "")
    if values["response_format"] is not None:
        grammar = _response_format(values["response_format"])
        if grammar is not None:
            found.append(NamedGrammar("response_format", grammar))
    if values["structured_outputs"] is not None:
        found += _structured_outputs(values["structured_outputs"])
    if not found:
        return None
    # A client may write one grammar in the fields of two servers: equal ones count once, and one
    # strict field is enough.
    different = {(one.grammar.kind, one.grammar.text) for one in found}
    if len(different) > 1:
        names = " and ".join(one.name for one in found)
        message = f"{names} are given; only one may say what the answer must be"
        _, second, *_ = found
        raise ApiError(400, message, param=second.name)
    return max((one.grammar for one in found), key=lambda grammar: grammar.strict)


@contextmanager
def format_is_at(path: str) -> Iterator[None]:
    """Errors about `response_format` name the field from which it was made."""
    try:
        yield
    except ApiError as exc:
        if path != RESPONSE_FORMAT:
            exc.message = _at(path, exc.message)
            exc.param = _at(path, exc.param or "") or None
        raise


def _at(path: str, text: str) -> str:
    # In the APIs that have another field, a schema is not in an object of its own.
    return text.replace(f"{RESPONSE_FORMAT}.json_schema", path).replace(RESPONSE_FORMAT, path)


def _found(
    fields: tuple[GrammarField, ...],
    values: Mapping[str, Any],
    prefix: str,
) -> list[NamedGrammar]:
    """Names and grammars of the fields that have a value."""
    found: list[NamedGrammar] = []
    for field in fields:
        value = values.get(field.name)
        if value is None:
            continue
        name = prefix + field.name
        grammar = field.read(name, value)
        if grammar is not None:
            found.append(NamedGrammar(name, grammar))
    return found


def _structured_outputs(outputs: Any) -> list[NamedGrammar]:
    name = "structured_outputs"
    if not isinstance(outputs, dict):
        raise _wrong(name, outputs, "an object")
    known = [field.name for field in _INSIDE]
    for key in sorted(outputs):
        # null has no effect, whatever the name.
        if outputs[key] is None or key in known or key == "strict":
            continue
        message = (
            f"{name} has the key {key[:MAX_SHOWN]!r}; allowed keys: {', '.join(known)} and strict"
        )
        raise ApiError(400, message, param=name)
    found = _found(_INSIDE, outputs, f"{name}.")
    if outputs.get("strict") is not True:
        return found
    strict: list[NamedGrammar] = []
    for key, grammar in found:
        of_key = msgspec.structs.replace(grammar, strict=True)
        strict.append(NamedGrammar(key, of_key))
    return strict


def _response_format(format: Any) -> Grammar | None:
    name = "response_format"
    if not _has_type(format):
        raise _wrong(name, format, "an object with a type")
    match format["type"]:
        case "text":
            return None
        case "json_object":
            return json_schema(f"{name}.schema", format.get("schema") or ANY_OBJECT)
        case "json_schema":
            # OpenAI's schema is in its own object, that of other servers beside the type.
            inner = format.get("json_schema")
            holder = format
            is_strict = False
            if isinstance(inner, dict):
                holder = inner
                is_strict = inner.get("strict") is True
            param = f"{name}.json_schema.schema"
            schema = holder.get("schema")
            if schema is None:
                message = f"{name}.json_schema has no schema"
                raise ApiError(400, message, param=param)
            return json_schema(param, schema, strict=is_strict)
        case "structural_tag":
            tag = dict(format)
            del tag["type"]
            return structural_tag(name, tag)
    kinds = "text, json_object, json_schema and structural_tag"
    message = f"{name}.type is {format['type'][:MAX_SHOWN]!r}; {kinds} are allowed"
    raise ApiError(400, message, param=f"{name}.type")


def _has_type(format: Any) -> bool:
    if not isinstance(format, dict):
        return False
    return isinstance(format.get("type"), str)


def _as_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(param: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        message = f"{param} is not valid JSON: {exc}"
        raise ApiError(400, message, param=param) from exc


def _text(param: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(param, value, what)
    return value


def _wrong(param: str, value: Any, what: str) -> ApiError:
    return ApiError(400, f"{param} is {repr(value)[:MAX_SHOWN]}; {what} is needed", param=param)
