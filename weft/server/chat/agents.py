"""What coding agents send beside OpenAI's and Anthropic's documented fields, as data.

Each entry was seen in requests of a released client. Code elsewhere reads these tables and knows no
client: a new quirk is a line here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import ChatMessage

# Tools that a provider runs on its own machines. A model here cannot call them: they are left out,
# and a warning names them. Some names end with a date ("web_search_preview_2025_03_11").
HOSTED_TOOLS = frozenset(
    {
        "web_search",
        "web_search_preview",
        "web_fetch",
        "file_search",
        "code_interpreter",
        "code_execution",
        "image_generation",
        "computer",
        "computer_use",
        "computer_use_preview",
        "local_shell",
        "shell",
        "apply_patch",
        "bash",
        "text_editor",
        "memory",
        "mcp",
        "mcp_toolset",
        "tool_search",
        "tool_search_tool_regex",
        "tool_search_tool_bm25",
        "advisor",
        "programmatic_tool_calling",
    }
)
_DATE = re.compile(r"_(?:\d{8}|\d{4}_\d{2}_\d{2})$")

# Items of a conversation that such tools, or another server, have made. They are left out, too.
HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "ghost_snapshot",
        "program",
        "program_output",
    }
)

# Lines at the beginning of a system block that are headers in the wrong place. Claude Code's change
# with each request (`cch=...`): left in, no prompt would begin like the one before it.
PSEUDO_HEADER = "x-anthropic-"
_PSEUDO_HEADERS = re.compile(rf"(?:{PSEUDO_HEADER}[a-z0-9-]+:[^\n]*(?:\n|$))+\n*")


# What Codex demands of a model's description beside the facts below: without one of these fields it
# refuses the whole list.
_CODEX: JsonObject = {
    "description": None,
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "upgrade": None,
    "support_verbosity": False,
    "default_verbosity": None,
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "experimental_supported_tools": [],
    "base_instructions": (
        "You are a coding agent that works in the user's terminal, in the current folder.\n"
        "Look at the files before you change them, and change no more than the task needs.\n"
        "Files named AGENTS.md tell how to work in their folder: follow them.\n"
        "Run the tests or the program, if there are any, to see whether a change is right.\n"
        "Go on until the task is done, then say in a few sentences what you did."
    ),
}
_EFFORTS = {"low": "thinks little", "medium": "thinks as usual", "high": "thinks long"}


class AgentFacts(NamedTuple):
    """What agents want to know about a model."""

    context_length: int
    has_tools: bool
    has_reasoning: bool
    sees_images: bool


def agent_model(name: str, facts: AgentFacts) -> JsonObject:
    """An entry of `models` in `/v1/models`."""
    capabilities = {
        "completion": True,
        "tools": facts.has_tools,
        "thinking": facts.has_reasoning,
        "vision": facts.sees_images,
    }
    efforts = _EFFORTS if facts.has_reasoning else {}
    return {
        "slug": name,
        "name": name,
        "model": name,
        "display_name": name,
        "context_window": facts.context_length,
        "context_length": facts.context_length,
        "capabilities": [capability for capability, has_it in capabilities.items() if has_it],
        "input_modalities": ["text", "image"] if facts.sees_images else ["text"],
        "supports_parallel_tool_calls": facts.has_tools,
        "supports_reasoning_summaries": False,
        "default_reasoning_level": "medium" if efforts else None,
        "supported_reasoning_levels": [
            {"effort": effort, "description": about} for effort, about in efforts.items()
        ],
        **_CODEX,
    }


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
