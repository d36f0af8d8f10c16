"""Tools on the way in and out: which may be called, what a forced call must look like, the names of calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.server.errors import ApiError

MAX_DESCRIBED = 64  # characters of a wrong value that are repeated in a message
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ALPHABET = string.ascii_letters + string.digits


class ToolUse(NamedTuple):
    """What a request says of its tools. `names` is empty if none may be called."""

    names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None  # of the calls, if the answer has to be calls
    one_call: bool = False
    arguments: dict[str, dict[str, Any]] | None = None  # schemas by name, if the model chooses and some tool is strict


def tool_use(tools: Sequence[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolUse:
    """The request's fields, checked. Raises `ApiError`."""
    functions = {_name(tool, place): tool["function"] for place, tool in enumerate(tools or ())}
    if len(functions) < len(tools or ()):
        raise ApiError(400, "two tools have the same name", param="tools")
    match choice:
        case "none":
            return ToolUse()
        case None | "auto":
            is_strict = any(function.get("strict") is True for function in functions.values())
            return ToolUse(frozenset(functions), None, not parallel, _arguments(functions) if is_strict else None)
        case "required":
            chosen = functions
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            chosen = {key: value for key, value in functions.items() if key == name}
            if not chosen:
                message = f"tool_choice names {name[:MAX_DESCRIBED]!r}, which is none of the tools"
                raise ApiError(400, message, param="tool_choice")
            parallel = False
        case _:
            message = f"tool_choice is {str(choice)[:MAX_DESCRIBED]}; none, auto, required or a function is allowed"
            raise ApiError(400, message, param="tool_choice")
    if not chosen:
        raise ApiError(400, "tool_choice is required, but there are no tools", param="tool_choice")
    return ToolUse(frozenset(chosen), forced_schema(chosen, parallel=parallel), not parallel)


def forced_schema(functions: dict[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """What a list of calls of these functions looks like, as `text.parsers.forced` reads it."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": function.get("parameters") or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, function in functions.items()
    ]
    item = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": item}
    return schema if parallel else {**schema, "maxItems": 1}


def strict_tag(arguments: dict[str, dict[str, Any]], trigger: str, around: tuple[str, str]) -> dict[str, Any]:
    """A structural tag: free text in which a call, once begun, is one of these and has arguments of its schema."""
    before, behind = around
    tags = [
        {
            "type": "tag",
            "begin": before.replace("NAME", name),
            "content": {"type": "json_schema", "json_schema": schema},
            "end": behind,
        }
        for name, schema in arguments.items()
    ]
    return {"format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}


def _arguments(functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema of each function's arguments; any object where it is not strict."""
    any_object = {"type": "object"}
    return {
        name: function.get("parameters") or any_object if function.get("strict") is True else any_object
        for name, function in functions.items()
    }


def call_id(id_len: int) -> str:
    """A new name for a call. Most models take any; `id_len` below 24 is for those that want a bare name so long."""
    if id_len < 24:
        return "".join(secrets.choice(_ALPHABET) for _ in range(id_len))
    return f"call_{secrets.token_hex(id_len // 2)}"


def _name(tool: dict[str, Any], place: int) -> str:
    """The name of a tool, which must be a function of OpenAI's form."""
    param = f"tools[{place}]"
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        kind = str(tool.get("type"))[:MAX_DESCRIBED]
        raise ApiError(400, f"{param} is of type {kind!r}; only functions are supported", param=param)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(
            400,
            f"{param} has the name {str(name)[:MAX_DESCRIBED]!r}; 1 to 64 letters, digits and the characters _ . - "
            "are allowed",
            param=f"{param}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"{param} has parameters that are no JSON schema", param=f"{param}.function.parameters")
    return name
