"""The grammar of an answer with calls: the list of forced calls, the choice of the generic format,
or free text in which calls follow their tools' grammars and schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from weft.json_types import JsonObject
from weft.messages.sampling import Grammar
from weft.server.chat.tools import COMPACT, ToolUse
from weft.text.parsers.call_forms import (
    ANY_TEXT,
    CallForms,
    CallList,
    CallText,
    fixed,
    in_sequence,
)
from weft.text.parsers.formats import ToolFormat

_NUMBER: JsonObject = {"type": "regex", "pattern": "[0-9]{1,4}"}
_FORCED = CallText('{"name": "NAME", "parameters": ', "}")
_EMPTY = fixed("")


def call_grammar(use: ToolUse, format: ToolFormat, *, has_mark: bool) -> Grammar | None:
    """The grammar for the calls of an answer in this format; None if the format and the tools need
    none. `has_mark`: see `generic_tag`."""
    if format.answer:
        tag = generic_tag(use, format, has_mark=has_mark)
    elif use.schema is not None:
        if not use.grammars:
            return Grammar("json_schema", _json_text(use.schema))
        tag = forced_tag(use)
    elif format.forms is not None and _holds(use, format.forms):
        tag = free_tag(use, format.forms)
    else:
        return None
    return Grammar("structural_tag", _json_text(tag))


def unenforced(use: ToolUse, *, is_enforced: bool) -> tuple[str, ...]:
    """A warning about grammars of custom tools that nothing holds the model to."""
    if not use.grammars or is_enforced:
        return ()
    names = ", ".join(use.grammars)
    return (
        "the grammars of these custom tools are not enforced, as another constraint is set: "
        + names,
    )


def _holds(use: ToolUse, forms: CallForms) -> bool:
    """Whether there is something to hold calls to."""
    return bool(use.grammars) or bool(use.strict and forms.has_schemas and forms.is_common)


def _json_text(value: JsonObject) -> str:
    return msgspec.json.encode(value).decode()


def free_tag(use: ToolUse, forms: CallForms) -> JsonObject:
    """Free text in which calls name one of the tools, and follow its grammar, or its schema if it
    is strict and the format has one; in other calls only the form is fixed."""
    schemas: dict[str, JsonObject] = {}
    for name in use.schemas:
        schemas[name] = use.schema_with_path(name) if name in use.strict else {"type": "object"}
    tags: list[JsonObject] = []
    triggers: dict[str, None] = {}
    first: list[JsonObject] = []
    for one in forms.lists:
        if not one.begin:
            first.append(in_sequence(_calls(use, one, schemas), fixed(one.end)))
            continue
        found = _listed_tags(use, one, schemas)
        tags += found
        if one.names_itself:
            triggers |= dict.fromkeys(tag["begin"] for tag in found)
        else:
            triggers[one.begin] = None
    for mark in forms.passing:
        if not mark.startswith(tuple(triggers)):
            triggers[mark] = None
        tags.append(_tag(mark, _EMPTY, ""))
    text: JsonObject = {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}
    names = "|".join(map(re.escape, schemas))
    fields: JsonObject = {
        "excludes": list(forms.never),
        "excluded_pattern": forms.never_like.replace("NAMES", names),
        "first": first,
        "never_first": forms.never_first.replace("NAMES", names),
        "is_last": forms.is_last,
    }
    return {"format": text | {name: value for name, value in fields.items() if value}}


def _listed_tags(
    use: ToolUse, one: CallList, schemas: Mapping[str, JsonObject]
) -> list[JsonObject]:
    """The tags of a list of calls; one for each tool if its name is a part of how they begin."""
    if one.separator is not None and not one.names_itself:
        return [_tag(one.begin, _calls(use, one, schemas), one.end)]
    begun = one.call._replace(
        before=one.begin + one.open + one.call.before, after=one.call.after + one.end
    )
    if one.separator is None:
        return _call_tags(use, schemas, begun)
    tags: list[JsonObject] = []
    more = _more_calls(use, one, schemas)
    for name, schema in schemas.items():
        begin = begun.before.replace("NAME", name)
        rest = [_arguments(use, name, one.call, schema), fixed(one.call.after), *more]
        tags.append(_tag(begin, in_sequence(*rest), one.end))
    return tags


def _calls(use: ToolUse, one: CallList, schemas: Mapping[str, JsonObject]) -> JsonObject:
    """One call, or several with a text between them."""
    # One text with what opens the list: of two texts that begin alike, a library takes the longer.
    opened = one.call._replace(before=one.open + one.call.before)
    first = _either(_call_tags(use, schemas, opened))
    more = _more_calls(use, one, schemas)
    return in_sequence(first, *more) if more else first


def _more_calls(use: ToolUse, one: CallList, schemas: Mapping[str, JsonObject]) -> list[JsonObject]:
    """The calls after the first one, each after a separator."""
    if one.separator is None:
        return []
    call = _either(_call_tags(use, schemas, one.call))
    return [{"type": "star", "content": in_sequence(fixed(one.separator), call)}]


def _either(formats: Sequence[JsonObject]) -> JsonObject:
    return {"type": "or", "elements": list(formats)}


def forced_tag(use: ToolUse) -> JsonObject:
    """The list of calls of `forced_schema`, where custom tools follow their grammars."""
    schemas = {name: {**use.schema_with_path(name), **COMPACT} for name in use.schemas}
    calls: JsonObject = {
        "type": "tags_with_separator",
        "tags": _call_tags(use, schemas, _FORCED),
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": use.one_call,
    }
    return {"format": in_sequence(fixed("["), calls, fixed("]"))}


def generic_tag(use: ToolUse, format: ToolFormat, *, has_mark: bool) -> JsonObject:
    """A structural tag that makes a model choose between calls and an answer, or write calls if
    they are forced.

    `has_mark`: the answer begins with its mark. Without one, it is free text with calls.
    """
    assert format.forms is not None, "the generic format has one form of calls"
    [one] = format.forms.lists
    schemas: dict[str, JsonObject] = {}
    for name in use.schemas:
        # Also one without a type.
        schemas[name] = {"type": "object", **use.schema_with_path(name), **COMPACT}
    tags = [
        {**tag, "begin": one.begin + tag["begin"]} for tag in _call_tags(use, schemas, one.call)
    ]
    calls: JsonObject = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": use.one_call,
    }
    if use.schema is not None:
        return {"format": calls}
    text: JsonObject = ANY_TEXT
    if tags:
        text = {
            "type": "triggered_tags",
            "triggers": [one.begin],
            "tags": tags,
            "stop_after_first": use.one_call,
        }
    if not has_mark:
        return {"format": text}
    answer = in_sequence(fixed(format.answer), text)
    return {"format": {"type": "or", "elements": [calls, answer]} if tags else answer}


def _call_tags(use: ToolUse, schemas: Mapping[str, JsonObject], call: CallText) -> list[JsonObject]:
    """A tag for the calls of each tool."""
    tags: list[JsonObject] = []
    for name, schema in schemas.items():
        content = _arguments(use, name, call, schema)
        before, number, rest = call.before.partition("NUMBER")
        if number:
            content = in_sequence(_NUMBER, fixed(rest.replace("NAME", name)), content)
        tags.append(_tag(before.replace("NAME", name), content, call.after))
    return tags


def _arguments(use: ToolUse, name: str, call: CallText, schema: JsonObject) -> JsonObject:
    """The arguments of a call; a custom tool with a grammar has one, a text in its grammar."""
    grammar = use.grammars.get(name)
    if grammar is None:
        return call.arguments.of(schema)
    return call.arguments.with_text(grammar.format(in_json=call.arguments.in_json))


def _tag(begin: str, content: JsonObject, end: str) -> JsonObject:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
