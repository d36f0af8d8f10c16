"""Requests in the shapes of released coding agents are served, turn after turn, and each prompt
begins with the one before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.agents.model import REFUSES_LATE, TAKES_LATE, scripted_model
from tests.agents.shapes import Aider, Shape, all_shapes
from tests.seeds import every_second
from tests.server.fake import HANG_S, RunningServer

NUM_TURNS = 20
SHARE = 0.98
NAMES = list(all_shapes())


class Script:
    """Says a call of the shape's tool in each turn: with and without reasoning, text, and other
    calls."""

    def __init__(self) -> None:
        self.tool = ""
        self.said: list[str] = []

    def __call__(self, prompt: str) -> str:
        number = len(self.said)
        arguments = json.dumps(
            {"command": f"cat {number}.txt", "cmd": 'say "ä"\n'}, ensure_ascii=False
        )
        call = f'<tool_call>\n{{"name": "{self.tool}", "arguments": {arguments}}}\n</tool_call>'
        thought = "" if number % 4 == 3 else f"<think>\nStep {number}.\n</think>\n\n"
        text = "" if number % 3 == 2 else f"I do step {number}.\n"
        several = f"{call}\n{call}" if number % 5 == 4 else call
        self.said.append(thought + (text + several if self.tool else f"Step {number} is done."))
        return self.said[-1]


@pytest.fixture(
    scope="module", params=[TAKES_LATE, REFUSES_LATE], ids=["takes late", "refuses late"]
)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[RunningServer, list[str], Script]]:
    script = Script()
    with scripted_model(script, late=request.param) as (server, prompts):
        yield server, prompts, script


def turn(server: RunningServer, shape: Shape) -> httpx.Response:
    answer = httpx.post(
        server.url + shape.path, json=shape.body(), headers=shape.headers, timeout=HANG_S
    )
    assert answer.status_code == 200, answer.text
    shape.take(answer.text)
    return answer


@pytest.mark.parametrize("name", every_second(NAMES))
def test_twenty_turns_of_an_agent_find_the_turn_before_in_the_cache(
    model: tuple[RunningServer, list[str], Script], name: str
) -> None:
    server, prompts, script = model
    shape = all_shapes()[name]
    script.tool = shape.tool
    script.said.clear()
    prompts.clear()
    for _ in range(NUM_TURNS):
        turn(server, shape)
    assert len(prompts) == NUM_TURNS
    assert shape.num_turns >= NUM_TURNS
    for number in range(1, NUM_TURNS):
        before = prompts[number - 1]
        prompt = prompts[number]
        if isinstance(shape, Aider):  # its rules stand again behind the task
            before = before[: before.rindex("user\nChange the greeting.")]
        num_alike = next(
            (place for place, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b),
            len(before),
        )
        assert num_alike >= SHARE * len(before), (
            f"{before[num_alike - 80 : num_alike + 80]!r} became "
            f"{prompt[num_alike - 80 : num_alike + 80]!r}"
        )


def test_what_is_left_out_of_a_request_is_named(
    model: tuple[RunningServer, list[str], Script],
) -> None:
    server, _, script = model
    shapes = all_shapes()
    for name, words in [("codex", "web_search"), ("claude code", "web_search_20250305")]:
        script.tool = shapes[name].tool
        answer = turn(server, shapes[name])
        assert words in answer.headers["x-weft-warnings"]


def test_headers_in_system_blocks_are_not_in_the_prompt(
    model: tuple[RunningServer, list[str], Script],
) -> None:
    server, prompts, script = model
    script.tool = "Bash"
    for system in (
        "x-anthropic-billing-header: cc_version=2; cch=00000;\nYou help.",
        [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cch=1;\nx-anthropic-other: 2\n\nYou help.",
            }
        ],
        [
            {"type": "text", "text": "x-anthropic-billing-header: cch=2;"},
            {"type": "text", "text": "You help."},
        ],
    ):
        prompts.clear()
        body: dict[str, Any] = {
            "model": "m",
            "max_tokens": 9,
            "system": system,
            "messages": [{"role": "user", "content": "Hi"}],
        }
        for path, changed in (
            ("/v1/messages", body),
            ("/v1/messages/count_tokens", body),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "system", "content": system}, *body["messages"]]},
            ),
        ):
            changed = {key: value for key, value in changed.items() if key != "model"}
            answer = httpx.post(server.url + path, json=changed, timeout=HANG_S)
            assert answer.status_code == 200, answer.text
        assert prompts == ["system\nYou help.\nuser\nHi\nassistant\n"] * 2


def test_a_server_is_looked_for_by_head(model: tuple[RunningServer, list[str], Script]) -> None:
    assert httpx.head(model[0].url + "/", timeout=HANG_S).status_code == 200


def test_models_are_listed_with_what_agents_read(
    model: tuple[RunningServer, list[str], Script],
) -> None:
    listed = httpx.get(model[0].url + "/v1/models", timeout=HANG_S).json()
    [one] = listed["models"]
    assert one["slug"] == listed["data"][0]["id"]
    assert one["context_window"] == listed["data"][0]["max_model_len"]
    assert {"tools", "thinking"} <= set(one["capabilities"])
    assert one["supports_parallel_tool_calls"] is True
    assert [level["effort"] for level in one["supported_reasoning_levels"]] == [
        "low",
        "medium",
        "high",
    ]
    assert one["base_instructions"]


def test_thinking_that_a_client_keeps_only_as_a_signature_is_in_the_next_prompt(
    model: tuple[RunningServer, list[str], Script],
) -> None:
    server, prompts, script = model
    shape = all_shapes()["claude code"]
    script.tool = shape.tool
    script.said.clear()
    turn(server, shape)
    whole = shape.body()
    for message in whole["messages"]:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "thinking":
                block["thinking"] = ""
    prompts.clear()
    httpx.post(server.url + shape.path, json=whole, timeout=HANG_S)
    assert "Step 0.\n</think>" in prompts[0]


def test_hosted_tools_and_blocks_of_another_server_are_left_out_of_messages(
    model: tuple[RunningServer, list[str], Script],
) -> None:
    server, prompts, script = model
    script.tool = ""
    said = [
        {"type": "redacted_thinking", "data": "x"},
        {
            "type": "server_tool_use",
            "id": "s1",
            "name": "web_search",
            "input": {"query": "a secret"},
        },
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "It rains."},
    ]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "So?"},
    ]
    hosted = {"type": "bash_20250124", "name": "bash"}
    body = {"max_tokens": 9, "messages": turns, "tools": [hosted]}
    prompts.clear()
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    warnings = answer.headers["x-weft-warnings"]
    for words in (
        "bash_20250124",
        "1 x redacted_thinking",
        "1 x server_tool_use",
        "1 x web_search_tool_result",
    ):
        assert words in warnings
    assert "It rains." in prompts[0]
    assert "secret" not in prompts[0]
    demanded = {**body, "tool_choice": {"type": "tool", "name": "bash"}}
    refused = httpx.post(f"{server.url}/v1/messages", json=demanded, timeout=HANG_S)
    assert refused.status_code == 400
    assert "bash" in refused.json()["error"]["message"]
    unknown = httpx.post(
        f"{server.url}/v1/messages",
        json={**body, "tools": [{"type": "telepathy", "name": "t"}]},
        timeout=HANG_S,
    )
    assert "tools[0]" in unknown.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_claude_code_reads() -> None:
    with scripted_model(lambda prompt: "Hello.", context=1_000) as (server, _):
        for size, most, message in [
            (2_000, 9, r"prompt is too long: (\d+) tokens > 1000 maximum"),
            (500, 800, r"input length and `max_tokens` exceed context limit: (\d+) \+ 800 > 1000"),
        ]:
            body = {"max_tokens": most, "messages": [{"role": "user", "content": "a" * size}]}
            answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=HANG_S)
            assert answer.status_code == 400
            found = re.search(message, answer.json()["error"]["message"])
            assert found is not None, answer.text
            assert int(found[1]) > size
