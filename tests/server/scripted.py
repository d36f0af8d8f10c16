"""Requests with tools, and what the engine of a test says to them."""

from __future__ import annotations

from typing import Any

import openai

from tests.server.fake import MODEL, RunningServer, as_bytes

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "news"}},
]
OSLO = {"city": "Oslo"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO = f'Well.\n{CALL}\n<tool_call>\n{{"name": "news", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nIt rains.\n</think>\n\nYes."


def say(server: RunningServer, text: str) -> None:
    server.engine.script = lambda ids: as_bytes(text)


def ask(sdk: openai.OpenAI, **options: Any) -> Any:
    return sdk.chat.completions.create(
        **{"model": MODEL, "messages": HI, "tools": TOOLS, **options}
    )


def record_prompts(server: RunningServer, text: str) -> list[str]:
    """Let the engine say `text`. Returns the prompts that it gets."""
    prompts: list[str] = []
    server.engine.script = lambda ids: (
        prompts.append(bytes(i for i in ids if i < 256).decode()) or as_bytes(text)
    )
    return prompts
