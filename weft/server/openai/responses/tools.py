"""The tools of a response: which of them the model is offered, and under which names.

    function    as in chat requests
    custom      a text instead of arguments, perhaps in a grammar (`chat/custom_tools.py`)
    namespace   a list of the two above: the model sees NAMESPACE.NAME, and a call tells both
    hosted      tools of a provider (`chat/agents.py`): left out, with a warning

Errors name the tool by its index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.config.numbers import shown
from weft.json_types import JsonObject
from weft.server.chat.agents import is_hosted
from weft.server.chat.tool_paths import ToolPath
from weft.server.errors import ApiError

_KINDS = ("function", "custom")
# Says when a client shows a tool to the model. Here the model sees all tools from the beginning.
_WHEN_TO_SHOW = ("defer_loading", "allowed_callers")


class OwnName(NamedTuple):
    """A tool's name inside its namespace."""

    namespace: str
    name: str


class OfferedTool(NamedTuple):
    tool: JsonObject  # in the form of chat requests
    path: ToolPath


class OfferedTools(NamedTuple):
    tools: list[JsonObject] | None  # in the form of chat requests; None: the client sent no list
    paths: list[ToolPath]  # of `tools` in the client's body
    names: Mapping[str, OwnName]  # by the name that the model sees; only tools of namespaces
    choice: Any  # `tool_choice`, with the names that the model sees
    warnings: tuple[str, ...]


def offered_tools(tools: Sequence[JsonObject] | None, choice: Any) -> OfferedTools:
    """Raises `ApiError` for a tool of an unknown kind, and if `choice` demands a hosted one."""
    names: dict[str, OwnName] = {}
    hosted: list[str] = []
    found: list[OfferedTool] = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "namespace":
            found += _of_namespace(tool, where, names)
        elif isinstance(kind, str) and is_hosted(kind):
            hosted.append(kind)
        else:
            found.append(_one(tool, where))
    warnings: tuple[str, ...] = ()
    if hosted:
        kinds = ", ".join(dict.fromkeys(kind[:64] for kind in hosted))
        warnings = (f"tools of these types do not run here and were left out: {kinds}",)
    chosen = _choice(choice, hosted, has_tools=bool(found))
    offered = None if tools is None else [one.tool for one in found]
    return OfferedTools(offered, [one.path for one in found], names, chosen, warnings)


def visible_name(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}.{name}" if namespace else name


def _of_namespace(tool: JsonObject, where: str, names: dict[str, OwnName]) -> Iterator[OfferedTool]:
    """The tools of a namespace; adds their names to `names`."""
    namespace = tool.get("name")
    if not isinstance(namespace, str) or not namespace:
        message = f"{where}.name is {shown(namespace)}; a namespace needs a name"
        raise ApiError(400, message, param=f"{where}.name")
    inside = tool.get("tools")
    if not isinstance(inside, list):
        message = f"{where}.tools is {shown(inside)}; a namespace needs a list of tools"
        raise ApiError(400, message, param=f"{where}.tools")
    about = tool.get("description")
    for number, one in enumerate(inside):
        param = f"{where}.tools[{number}]"
        if not isinstance(one, dict):
            raise ApiError(400, f"{param} is {shown(one)}; a tool is needed", param=param)
        placed = _one(one, param, inside="namespace")
        chat = placed.tool
        fields = chat[chat["type"]]
        name = fields.get("name") if isinstance(fields, dict) else None
        if not isinstance(name, str) or not name:
            message = f"{placed.path.of('name')} is {shown(name)}; a tool needs a name"
            raise ApiError(400, message, param=placed.path.of("name"))
        visible = visible_name(namespace, name)
        names[visible] = OwnName(namespace, name)
        own = fields.get("description")
        # The namespace's own text stands once, before that of its first tool.
        texts = [about if number == 0 else None, own]
        described = "\n\n".join(text for text in texts if isinstance(text, str) and text)
        changed = {**fields, "name": visible}
        if described:
            changed["description"] = described
        yield placed._replace(tool={**chat, chat["type"]: changed})


def _one(tool: JsonObject, where: str, inside: str = "") -> OfferedTool:
    """A tool in the form of chat requests: the fields beside its type go into an object."""
    kind = tool.get("type")
    if kind not in _KINDS:
        allowed = "function and custom" if inside else "function, custom and namespace"
        of = f" of a {inside}" if inside else ""
        message = f"{where} is of type {shown(kind)}; the types{of} here are {allowed}"
        raise ApiError(400, message, param=where)
    if kind in tool:
        return OfferedTool(tool, ToolPath(where, f"{where}.{kind}"))
    fields = {
        key: value for key, value in tool.items() if key != "type" and key not in _WHEN_TO_SHOW
    }
    return OfferedTool({"type": kind, kind: fields}, ToolPath(where, where))


def _choice(choice: Any, hosted: Iterable[str], *, has_tools: bool) -> Any:
    """`tool_choice` with visible names. Raises `ApiError` if only hosted tools can satisfy it."""
    if not isinstance(choice, dict):
        if choice == "required" and hosted and not has_tools:
            raise _not_here("required", next(iter(hosted)))
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice)
    if isinstance(kind, str) and kind not in _KINDS and is_hosted(kind):
        raise _not_here(kind, kind)
    return _with_visible_name(choice)


def _allowed(choice: JsonObject) -> JsonObject:
    """A list of allowed tools without the hosted ones."""
    inner = choice.get("allowed_tools")
    holder = inner if isinstance(inner, dict) else choice
    listed = holder.get("tools")
    if not isinstance(listed, list):
        return choice
    kept = [_with_visible_name(one) for one in listed if not _is_hosted(one)]
    if listed and not kept and holder.get("mode") == "required":
        raise _not_here("required", str(listed[0].get("type")))
    changed = {**holder, "tools": kept}
    return {**choice, "allowed_tools": changed} if isinstance(inner, dict) else changed


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and is_hosted(kind)


def _with_visible_name(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("namespace"), str):
        return tool
    kept = {key: value for key, value in tool.items() if key != "namespace"}
    return {**kept, "name": visible_name(tool["namespace"], str(tool.get("name")))}


def _not_here(choice: str, kind: str) -> ApiError:
    message = (
        f"tool_choice is {choice[:64]!r}, but tools of type {kind[:64]!r} do not run here; "
        "functions, custom tools and namespaces of them can be called"
    )
    return ApiError(400, message, param="tool_choice", code="unsupported_parameter")
