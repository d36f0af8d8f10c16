"""What the front does for a turn of 76 kB and 24 tools: each conversation is rendered once, and once
for each block to keep, and a prompt is tokenized as often as there are such ends."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.agents.front_work import BODY_BYTES, NUM_TOOLS, Counter, filled
from tests.agents.model import scripted_model
from tests.agents.shapes import all_shapes
from tests.server.fake import HANG_S

NUM_TURNS = 4
CASES = [("codex", "/v1/responses", 0), ("claude code", "/v1/messages", 2)]


@pytest.mark.parametrize(("name", "path", "num_marks"), CASES)
def test_a_turn_is_rendered_and_tokenized_no_more_than_it_must_be(
    name: str, path: str, num_marks: int
) -> None:
    shape = all_shapes()[name]
    call = json.dumps({"name": shape.tool, "arguments": {"command": "ls", "cmd": "ls"}})
    counter = Counter()
    said = f"<tool_call>\n{call}\n</tool_call>"
    with scripted_model(lambda prompt: said) as (server, prompts), counter.counting():
        for _ in range(NUM_TURNS):
            body = filled(shape.body(), path)
            assert len(body["tools"]) == NUM_TOOLS
            assert len(json.dumps(body)) > 0.9 * BODY_BYTES
            before = counter.num_renderings, counter.num_characters
            answer = httpx.post(
                server.url + shape.path, json=body, headers=shape.headers, timeout=HANG_S
            )
            assert answer.status_code == 200, answer.text
            shape.take(answer.text)
            assert counter.num_renderings - before[0] <= 1 + num_marks
            tokenized = counter.num_characters - before[1]
            # The model sees the prompt without its special tokens.
            assert tokenized <= 1.01 * (1 + num_marks) * len(prompts[-1])
