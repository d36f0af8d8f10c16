"""Where the client's body has the tools of a chat request: errors name a tool by its path.

tools[3].function.name    chat
tools[3].name             responses, messages
tools[3].tools[0].name    a tool of a namespace in responses
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.json_types import JsonObject


class ToolPath(NamedTuple):
    tool: str
    fields: str  # of the object with its name
    schema: str = "parameters"  # the name of the field with the schema of its arguments

    def of(self, field: str) -> str:
        return f"{self.fields}.{field}"

    @property
    def of_schema(self) -> str:
        return self.of(self.schema)


def chat_paths(tools: Sequence[JsonObject] | None) -> list[ToolPath]:
    """The paths of tools that are in a body as chat requests have them."""
    paths: list[ToolPath] = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = "custom" if tool.get("type") == "custom" else "function"
        paths.append(ToolPath(where, f"{where}.{kind}"))
    return paths
