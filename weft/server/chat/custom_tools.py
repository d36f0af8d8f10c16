"""Custom tools, which take a text instead of arguments.

The model gets them as functions with one parameter, `input`. Template, grammar and parsers handle
only these functions; answers translate the calls back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from weft.config.numbers import shown
from weft.json_types import JsonObject
from weft.server.chat.models import ChatMessage
from weft.server.chat.tool_paths import ToolPath, chat_paths
from weft.server.errors import ApiError
from weft.text.parsers.events import CallArguments, CallBegin, Event

INPUT_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_ESCAPE = len(r"\ud83d\ude00")  # the longest escape of one character


class CustomCall(NamedTuple):
    """A complete call of a custom tool; `call` counts all calls, also those of functions, from
    0."""

    call: int
    name: str
    input: str


class TextGrammar(NamedTuple):
    """The texts that a custom tool takes."""

    syntax: Literal["lark", "regex"]
    definition: str
    path: str  # of the definition in the client's body

    def format(self, *, in_json: bool) -> JsonObject:
        """The grammar as a part of a structural tag. `in_json`: of the text in a JSON string."""
        return {
            "type": "grammar",
            "syntax": self.syntax,
            "definition": self.definition,
            "in_json": in_json,
            "path": self.path,
        }


class CustomCalls:
    """Finds the calls of custom tools among the events of one completion.

    Each call becomes one event when it is complete.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: CallBegin | None = None
        self._pieces: list[str] = []  # pieces of its arguments

    def take(self, events: Sequence[Event], *, is_last: bool) -> list[Event | CustomCall]:
        """The events, with each call of a custom tool as one event."""
        merged: list[Event | CustomCall] = []
        for event in events:
            if (
                isinstance(event, CallArguments)
                and self._open is not None
                and event.call == self._open.call
            ):
                self._pieces.append(event.text)
                continue
            self._close(merged)
            if isinstance(event, CallBegin) and event.name in self._names:
                self._open = event
            else:
                merged.append(event)
        if is_last:
            self._close(merged)
        return merged

    def _close(self, merged: list[Event | CustomCall]) -> None:
        if self._open is None:
            return
        text = input_of("".join(self._pieces))
        merged.append(CustomCall(self._open.call, self._open.name, text))
        self._open = None
        self._pieces.clear()


def is_custom(tool: JsonObject) -> bool:
    return tool.get("type") == "custom"


def as_functions(
    tools: Sequence[JsonObject] | None, paths: Sequence[ToolPath] = ()
) -> list[JsonObject] | None:
    """Tools in the form for the model. Raises `ApiError` for an unsupported custom tool."""
    if tools is None:
        return None
    functions = []
    for tool, path in zip(tools, paths or chat_paths(tools), strict=True):
        if is_custom(tool):
            functions.append(_function(tool, path))
        else:
            functions.append(_without_mark(tool))
    return functions


def _without_mark(tool: JsonObject) -> JsonObject:
    """A tool without its `cache_control`, which does not belong in the prompt."""
    function = tool.get("function")
    if isinstance(function, dict) and "cache_control" in function:
        kept = {name: value for name, value in function.items() if name != "cache_control"}
        tool = {**tool, "function": kept}
    if "cache_control" in tool:
        return {name: value for name, value in tool.items() if name != "cache_control"}
    return tool


def _function(tool: JsonObject, path: ToolPath) -> JsonObject:
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        message = f"{path.tool} is of type 'custom', but has no object custom"
        raise ApiError(400, message, param=path.tool)
    grammar = text_grammar(custom.get("format"), path.of("format"))
    function = {"name": custom.get("name"), "parameters": INPUT_SCHEMA}
    described = custom.get("description")
    if grammar is not None:
        rule = f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}"
        described = f"{described}\n\n{rule}" if described else rule
    if described is not None:
        function["description"] = described
    return {"type": "function", "function": function}


def text_grammar(format: Any, param: str) -> TextGrammar | None:
    """The grammar of a custom tool's format; None for any text. Raises `ApiError`.

    In chat requests the grammar is in its own object, in responses it is not.
    """
    kind = format.get("type") if isinstance(format, dict) else format
    if kind in (None, "text"):
        return None
    if kind != "grammar":
        message = f"{param} is of type {shown(kind)}; text and grammar are allowed"
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    inner = format.get("grammar", format)
    if inner is not format:
        param = f"{param}.grammar"
    grammar = inner if isinstance(inner, dict) else {}
    syntax = grammar.get("syntax")
    if syntax not in ("lark", "regex"):
        message = f"{param}.syntax is {shown(syntax)}; lark and regex are allowed"
        raise ApiError(400, message, param=f"{param}.syntax")
    definition = grammar.get("definition")
    if not isinstance(definition, str) or not definition.strip():
        message = f"{param}.definition is {shown(definition)}; a grammar is needed"
        raise ApiError(400, message, param=f"{param}.definition")
    return TextGrammar(syntax, definition, f"{param}.definition")


def with_function_calls(message: ChatMessage, where: str) -> ChatMessage:
    """A message of the history, with its calls of custom tools as function calls.

    Raises `ApiError`.
    """
    calls = message.tool_calls
    if not calls or not any(map(is_custom, calls)):
        return message
    functions = []
    for index, call in enumerate(calls):
        if is_custom(call):
            functions.append(_function_call(call, f"{where}.tool_calls[{index}]"))
        else:
            functions.append(call)
    return msgspec.structs.replace(message, tool_calls=functions)


def _function_call(call: JsonObject, param: str) -> JsonObject:
    custom = call.get("custom")
    name: Any = None
    text: Any = None
    if isinstance(custom, dict):
        name = custom.get("name")
        text = custom.get("input")
    if not isinstance(name, str) or not isinstance(text, str):
        message = f"{param} is of type 'custom'; it needs custom with the strings name and input"
        raise ApiError(400, message, param=param)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(text)},
    }


def arguments_of(text: str) -> str:
    """The function arguments that contain a custom tool's input."""
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """The input inside function arguments; of truncated arguments, its beginning.

    Arguments of another form are returned unchanged.
    """
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _beginning_of_input(arguments)
    if isinstance(found, dict) and isinstance(found.get("input"), str):
        return str(found["input"])
    return arguments


def _beginning_of_input(arguments: str) -> str:
    match = _BEGINNING.match(arguments)
    if match is None:
        return ""
    text = arguments[match.end() :]
    for dropped in range(min(len(text), _LONGEST_ESCAPE) + 1):  # an escape may be truncated
        try:
            return msgspec.json.decode(f'"{text[: len(text) - dropped]}"', type=str)
        except (msgspec.DecodeError, UnicodeError):
            continue
    return ""
