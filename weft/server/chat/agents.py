"""What coding agents send beside OpenAI's and Anthropic's documented fields, as data.

Each entry was seen in requests of a released client. Code elsewhere reads these tables and knows no
client: a new quirk is a line here.
"""

from __future__ import annotations

import re

import msgspec

from weft.server.chat.models import ChatMessage

# Tools that a provider runs on its own machines. A model here cannot call them: they are left out,
# and a warning names them. Some names end with a date ("web_search_preview_2025_03_11").
HOSTED_TOOLS = frozenset(
    {"web_search", "web_search_preview", "web_fetch", "file_search", "code_interpreter"}
    | {"code_execution", "image_generation", "computer", "computer_use", "computer_use_preview"}
    | {"local_shell", "shell", "apply_patch", "bash", "text_editor", "memory", "mcp", "mcp_toolset"}
    | {"tool_search", "tool_search_tool_regex", "tool_search_tool_bm25", "advisor"}
    | {"programmatic_tool_calling"}
)
_DATE = re.compile(r"_(?:\d{8}|\d{4}_\d{2}_\d{2})$")

# Items of a conversation that such tools, or another server, have made. They are left out, too.
HOSTED_ITEMS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
    | {"computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"}
    | {"shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"}
    | {"mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"}
    | {"tool_search_call", "tool_search_output", "ghost_snapshot", "program", "program_output"}
)

# Lines at the beginning of a system block that are headers in the wrong place. Claude Code's change
# with each request (`cch=...`): left in, no prompt would begin like the one before it.
PSEUDO_HEADER = "x-anthropic-"
_PSEUDO_HEADERS = re.compile(rf"(?:{PSEUDO_HEADER}[a-z0-9-]+:[^\n]*(?:\n|$))+\n*")


def is_hosted(kind: str) -> bool:
    """Whether a tool of this type runs at a provider."""
    return _DATE.sub("", kind) in HOSTED_TOOLS


def without_pseudo_headers(text: str) -> str:
    """A system block without the headers at its beginning."""
    if not text.startswith(PSEUDO_HEADER):
        return text
    return _PSEUDO_HEADERS.sub("", text, count=1)


def without_headers(message: ChatMessage) -> ChatMessage:
    """A system message without the headers at the beginning of its texts."""
    content = message.content
    if isinstance(content, str):
        if not content.startswith(PSEUDO_HEADER):
            return message
        return msgspec.structs.replace(message, content=without_pseudo_headers(content))
    if content is None or not any((part.text or "").startswith(PSEUDO_HEADER) for part in content):
        return message
    parts = [
        msgspec.structs.replace(part, text=without_pseudo_headers(part.text)) if part.text else part
        for part in content
    ]
    return msgspec.structs.replace(message, content=[one for one in parts if one.text != ""])
