"""Tools in requests and answers: which tools a model may call, the schema of a forced call, and the
ids of calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.config.numbers import shown
from weft.json_types import PATH_KEY, JsonObject
from weft.server.chat.custom_tools import TextGrammar, as_functions, is_custom, text_grammar
from weft.server.chat.tool_paths import ToolPath, chat_paths
from weft.server.errors import ApiError

MAX_DESCRIBED = 64  # characters of a wrong value that a message repeats
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")  # of a namespace: with its name
NO_SCHEMAS: Mapping[str, JsonObject] = MappingProxyType({})
NO_PATHS: Mapping[str, str] = MappingProxyType({})
NO_GRAMMARS: Mapping[str, TextGrammar] = MappingProxyType({})
# No person reads such JSON, and a weak model would go on with white space.
COMPACT: JsonObject = {"x-guidance": {"whitespace_flexible": False}}
_ALPHABET = string.ascii_letters + string.digits


class ToolUse(NamedTuple):
    """The tools that the model may call. `names` is empty if it may call none."""

    names: frozenset[str] = frozenset()
    schema: JsonObject | None = None  # schema of the calls, if the answer must be calls
    one_call: bool = False
    strict: frozenset[str] = frozenset()  # names of strict tools, if calling is optional
    # The names that are custom tools, and the grammars of those that have one.
    custom: frozenset[str] = frozenset()
    grammars: Mapping[str, TextGrammar] = NO_GRAMMARS
    schema_paths: Mapping[str, str] = NO_PATHS  # of the schemas in the client's body, by name
    # Schemas of arguments by name, for formats that write values without types, and for the
    # grammar of the generic format.
    schemas: Mapping[str, JsonObject] = NO_SCHEMAS

    def schema_with_path(self, name: str) -> JsonObject:
        """A schema that says its path, for an error of its grammar."""
        schema = self.schemas[name]
        path = self.schema_paths.get(name)
        return schema if path is None else {**schema, PATH_KEY: path}


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[JsonObject] | None,
    choice: Any,
    *,
    parallel: bool,
    paths: Sequence[ToolPath] = (),
) -> ToolUse:
    """The tools of a request, from its checked fields. Raises `ApiError`.

    `paths`: those of the tools in the client's body, if it is no chat request.
    """
    paths = paths or chat_paths(tools)
    functions: dict[str, JsonObject] = {}
    path_of: dict[str, ToolPath] = {}
    for tool, path in zip(as_functions(tools, paths) or (), paths, strict=True):
        name = _name(tool, path)  # checks that it is a function
        if name in functions:
            param = path.of("name")
            message = f"{param} is {name!r}, which is already the name of {path_of[name].tool}"
            raise ApiError(400, message, param=param)
        functions[name] = tool["function"]
        path_of[name] = path
    custom = frozenset(tool["custom"]["name"] for tool in tools or () if is_custom(tool))
    grammars = _grammars(tools or (), paths)
    schema_paths = {name: path.of_schema for name, path in path_of.items()}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        functions, choice = _allowed(functions, choice)
    if choice == "none":
        return NO_TOOLS
    if choice is None or choice == "auto":
        return ToolUse(
            names=frozenset(functions),
            one_call=not parallel,
            strict=frozenset(name for name, one in functions.items() if one.get("strict") is True),
            custom=custom & functions.keys(),
            grammars=_only(grammars, functions),
            schema_paths=schema_paths,
            schemas={name: _parameters(function) for name, function in functions.items()},
        )
    chosen = functions
    if choice != "required":
        name = _chosen_name(choice, custom)
        if name not in functions:
            raise _not_among_tools(f"tool_choice names {name[:MAX_DESCRIBED]!r}")
        chosen = {name: functions[name]}
        parallel = False
    if not chosen:
        message = "tool_choice asks for a call, but there are no tools"
        raise ApiError(400, message, param="tool_choice")
    return ToolUse(
        names=frozenset(chosen),
        schema=forced_schema(chosen, schema_paths, parallel=parallel),
        one_call=not parallel,
        custom=custom & chosen.keys(),
        grammars=_only(grammars, chosen),
        schema_paths=schema_paths,
        schemas={name: _parameters(function) for name, function in chosen.items()},
    )


def _grammars(tools: Sequence[JsonObject], paths: Sequence[ToolPath]) -> dict[str, TextGrammar]:
    """The grammars of the custom tools that have one, by name."""
    found: dict[str, TextGrammar] = {}
    for tool, path in zip(tools, paths, strict=True):
        if is_custom(tool):
            custom = tool["custom"]
            grammar = text_grammar(custom.get("format"), path.of("format"))
            if grammar is not None:
                found[custom["name"]] = grammar
    return found


def _only(grammars: Mapping[str, TextGrammar], names: Container[str]) -> Mapping[str, TextGrammar]:
    return {name: grammar for name, grammar in grammars.items() if name in names}


def _chosen_name(choice: Any, custom: frozenset[str]) -> str:
    """The name of the tool that `tool_choice` forces. Raises `ApiError`."""
    match choice:
        case (
            {"type": "function" as kind, "function": {"name": str(name)}}
            | {"type": "custom" as kind, "custom": {"name": str(name)}}
            | {"type": "function" | "custom" as kind, "name": str(name)}
        ):
            if (kind == "custom") != (name in custom):
                raise _not_among_tools(f"tool_choice names {name[:MAX_DESCRIBED]!r}")
            return str(name)
    message = (
        f"tool_choice is {str(choice)[:MAX_DESCRIBED]}; none, auto, required or a tool is allowed"
    )
    raise ApiError(400, message, param="tool_choice")


def _not_among_tools(what: str) -> ApiError:
    return ApiError(400, f"{what}, which is not one of the tools", param="tool_choice")


def forced_schema(
    functions: Mapping[str, JsonObject], paths: Mapping[str, str], *, parallel: bool
) -> JsonObject:
    """The JSON schema of a list of calls, in the form that `text.parsers.readers.forced` reads."""
    calls: list[JsonObject] = []
    for number, (name, function) in enumerate(functions.items()):
        # The JSON pointer to the schema of the call.
        pointer = "#/items" if len(functions) == 1 else f"#/items/anyOf/{number}"
        parameters = _moved(_parameters(function), f"{pointer}/properties/parameters")
        call = {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": {**parameters, PATH_KEY: paths[name]},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        calls.append(call)
    schema: JsonObject = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        **COMPACT,
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _parameters(function: JsonObject) -> JsonObject:
    """The schema of a function's arguments; without a schema it has no arguments, as OpenAI
    specifies."""
    return function.get("parameters") or {"type": "object", "properties": {}}


def _moved(schema: Any, pointer: str) -> Any:
    """A schema as a part of another schema, at `pointer`: its references are adjusted."""
    if isinstance(schema, list):
        return [_moved(one, pointer) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, pointer) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = pointer + ref[1:]
    return moved


def _allowed(
    functions: dict[str, JsonObject], choice: JsonObject
) -> tuple[dict[str, JsonObject], str]:
    """The functions that `choice` allows, and its mode: "auto", or "required" if one must be
    called.

    In chat requests the list is in its own object, in responses it is not.
    """
    allowed = choice.get("allowed_tools", choice)
    mode: Any = None
    tools: Any = None
    if isinstance(allowed, dict):
        mode = allowed.get("mode", "auto")
        tools = allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        message = (
            "tool_choice of the type allowed_tools needs mode (auto or required) "
            "and a list of tools"
        )
        raise ApiError(400, message, param="tool_choice")
    names = [_allowed_name(tool) for tool in tools]
    for name in names:
        if name not in functions:
            raise _not_among_tools(f"tool_choice allows {str(name)[:MAX_DESCRIBED]!r}")
    return {name: function for name, function in functions.items() if name in names}, mode


def _allowed_name(tool: Any) -> Any:
    """The name of a tool in a list of allowed tools, in either form; None if it has none."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool.get("custom", tool))
    return function.get("name") if isinstance(function, dict) else None


def call_id(id_len: int) -> str:
    """A new id for a call.

    Most models accept any id; `id_len` below 24 is for models that need a bare id of this length.
    """
    if id_len < 24:
        return "".join(secrets.choice(_ALPHABET) for _ in range(id_len))
    return f"call_{secrets.token_hex(id_len // 2)}"


def _name(tool: JsonObject, path: ToolPath) -> str:
    """The name of a tool, which must be a function in OpenAI's form. Raises `ApiError`."""
    function = tool.get("function")
    kind = tool.get("type", "function")
    if kind != "function":
        named = str(kind)[:MAX_DESCRIBED]
        message = f"{path.tool} is of type {named!r}; functions and custom tools are supported"
        raise ApiError(400, message, param=path.tool)
    if not isinstance(function, dict):
        message = f"{path.tool} has no object 'function', which has the name and the parameters"
        raise ApiError(400, message, param=path.tool)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = path.of("name")
        message = (
            f"{param} is {str(name)[:MAX_DESCRIBED]!r}; "
            "1 to 128 letters, digits and the characters _ . - are allowed"
        )
        raise ApiError(400, message, param=param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        param = path.of_schema
        raise ApiError(400, f"{param} is {shown(parameters)}; a JSON schema is needed", param=param)
    return name
