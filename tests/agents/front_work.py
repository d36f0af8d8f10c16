"""Counts what the front does for a turn of an agent, whose body is as large as a released one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.agents.shapes import Body
from weft.server.chat import conversation
from weft.text.tokenizer import Tokenizer

NUM_TOOLS = 24
BODY_BYTES = 76_000


class Counter:
    """Counts renderings, and tokenizing with its time."""

    def __init__(self) -> None:
        self.num_renderings = 0
        self.num_characters = 0
        self.tokenizing_s = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        render = conversation.chat_text
        encode = Tokenizer.encode_async

        async def rendered(*args: Any) -> Any:
            self.num_renderings += 1
            return await render(*args)

        async def encoded(tokenizer: Tokenizer, texts: Sequence[str], **options: Any) -> Any:
            self.num_characters += sum(map(len, texts))
            began_s = time.process_time()
            found = await encode(tokenizer, texts, **options)
            self.tokenizing_s += time.process_time() - began_s
            return found

        conversation.chat_text = rendered  # type: ignore[assignment]
        Tokenizer.encode_async = encoded  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            conversation.chat_text = render
            Tokenizer.encode_async = encode  # type: ignore[method-assign]


def filled(body: Body, path: str) -> Body:
    """The body with so many tools, whose descriptions make it as large as asked for."""
    tools = list(body["tools"])
    words = "Look before you change. Run the tests. " * 64
    missing = BODY_BYTES - len(json.dumps(body))
    length = max(missing // (NUM_TOOLS - len(tools)) - 150, 0)
    for number in range(NUM_TOOLS - len(tools)):
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        tool: Body = {"name": f"tool_{number}", "description": (words * 4)[:length]}
        if path == "/v1/messages":
            tools.append({**tool, "input_schema": parameters})
        else:
            tools.append({"type": "function", **tool, "parameters": parameters})
    return {**body, "tools": tools}
