"""The server that clients talk to, and what they ask of it.

The bundled model writes stories, so what it says is forced by a grammar where its form matters:
`WEATHER_CALL` through the field `guided_choice` is a call as a model that knows tools would write
it, for the parsers to find.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.e2e.server import wait_until

KEY = "key-of-the-tests"
MODEL = "weft-nano"
HI: list[Any] = [
    {
        "role": "user",
        "content": "Write a story about a boy named Tom who lost his ball and asked all his friends for help.",
    }
]
NUM_PARALLEL = 50

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": CITY_SCHEMA},
    },
    {
        "type": "function",
        "function": {"name": "news", "parameters": {"type": "object", "maxProperties": 0}},
    },
]
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = f'{WEATHER_CALL}\n<tool_call>\n{{"name": "news", "arguments": {{}}}}\n</tool_call>'
OSLO = {"city": "Oslo"}


@dataclass(frozen=True)
class Api:
    """Where the server is, and how to see whether it has work."""

    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def becomes_idle(self) -> bool:
        """Whether at last nothing runs, waits or is held."""
        return wait_until(self._is_idle)

    def _is_idle(self) -> bool:
        request = urllib.request.Request(
            f"{self.v1}/loads", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            [load] = json.load(answer)["loads"]
        return not (load["num_total_reqs"] or load["num_used_tokens"])
