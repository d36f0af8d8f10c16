"""Why a turn of an agent missed the cache, told by a real engine for the shapes of two clients."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.model import TAKES_LATE, TEMPLATE
from tests.agents.shapes import ClaudeCode, Codex, Shape
from tests.seeds import slow
from tests.server.real_engine import RealServer, serving
from weft.config.server import ServerConfig

NANO = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
THOUGHT = "The greeting stands in the first line of the file, so I look there before the others."
Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("models") / "nano"
    shutil.copytree(NANO, folder)
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text())
    known["chat_template"] = TEMPLATE.replace("LATE\n", TAKES_LATE)
    path.write_text(json.dumps(known))
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    with serving(folder, config=config, kv_tokens=16_384, page_size=16) as it:
        yield it


@pytest.fixture(autouse=True)
def empty(server: RealServer) -> None:
    """No test finds what another has computed."""
    assert server.post("/flush_cache").status_code == 200


def ask(server: RealServer, shape: Shape, rid: str, body: Body) -> Body:
    """Send a turn. Returns why it missed the cache."""
    short = {"max_output_tokens": 16} if isinstance(shape, Codex) else {"max_tokens": 4}
    body = {**copy.deepcopy(body), **short, "stream": False}
    del body["model"]
    headers = {"x-request-id": rid}
    answer = server.wait(server.http.post(shape.path, json=body, headers=headers))
    assert answer.status_code == 200, answer.text
    # Responses are named by the server.
    told = server.get(f"/requests/{answer.headers['x-request-id']}").json()
    cause: Body = told["requests"][0]["cache_cause"]
    return cause


def add_step(shape: Shape, number: int) -> None:
    """The answer of a turn and the result of its call, as the client sends both back."""
    if isinstance(shape, Codex):
        shape.items += [
            {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": THOUGHT}],
            },
            {
                "type": "function_call",
                "call_id": f"c{number}",
                "name": "exec_command",
                "arguments": json.dumps({"cmd": f"cat {number}.txt"}),
            },
            {"type": "function_call_output", "call_id": f"c{number}", "output": shape.result()},
        ]
        return
    assert isinstance(shape, ClaudeCode)
    shape.messages += [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": ""},
                {
                    "type": "tool_use",
                    "id": f"t{number}",
                    "name": "Bash",
                    "input": {"command": f"cat {number}.txt"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": f"t{number}", "content": shape.result()}
            ],
        },
    ]


SHAPES = pytest.mark.parametrize("make", [Codex, ClaudeCode])


def history(shape: Shape) -> list[Body]:
    """What a client sends of the conversation."""
    return shape.items if isinstance(shape, Codex) else shape.messages  # type: ignore[attr-defined]


@SHAPES
def test_turns_continue_each_other_though_a_header_changes(
    server: RealServer, make: type[Shape]
) -> None:
    """`cch` changes with each turn, in a header that is left out of the prompt. The answers that
    come back are not those that the model wrote."""
    shape = make()
    ask(server, shape, f"{make.__name__}-0", shape.body())
    bodies = []
    for number in range(1, 3):
        add_step(shape, number)
        bodies.append(shape.body())
        cause = ask(server, shape, f"{make.__name__}-{number}", bodies[-1])
        assert cause["cause"] == "new text", cause
        assert cause["missed_tokens"] == 0
    if make is ClaudeCode:
        assert bodies[0]["system"][0] != bodies[1]["system"][0]


def test_a_header_that_is_not_known_is_named_as_what_changes(server: RealServer) -> None:
    shape = ClaudeCode()
    causes = []
    for number in range(2):
        body = shape.body()
        body["system"][0] = {"type": "text", "text": f"session-counter: {number + 3}"}
        causes.append(ask(server, shape, f"header-{number}", body))
        add_step(shape, number)
    assert causes[1]["cause"] == "changed", causes[1]
    assert causes[1]["rid"] == "header-0"
    assert "4" in causes[1]["ours_text"]
    assert "3" in causes[1]["theirs_text"]
    assert causes[1]["missed_tokens"] > 300
    assert "date or a counter" in causes[1]["advice"]


@SHAPES
def test_thinking_that_a_client_no_longer_sends_is_named_as_dropped(
    server: RealServer, make: type[Shape]
) -> None:
    shape = make()
    for number in range(1, 4):
        add_step(shape, number)
        ask(server, shape, f"whole-{make.__name__}-{number}", shape.body())
    kept = history(shape)
    if isinstance(shape, Codex):
        shape.items = [one for one in kept if one["type"] != "reasoning"]
    else:
        for message in kept:
            if message["role"] == "assistant":
                message["content"] = message["content"][1:]
    cause = ask(server, shape, f"dropped-{make.__name__}", shape.body())
    assert cause["cause"] == "dropped", cause
    assert "reasoning" in cause["advice"]


@pytest.mark.parametrize("make", [ClaudeCode, *slow([Codex])])
def test_a_tool_that_is_added_is_named_as_new_text(server: RealServer, make: type[Shape]) -> None:
    shape = make()
    add_step(shape, 1)
    body = shape.body()
    ask(server, shape, f"few-{make.__name__}", body)
    one = copy.deepcopy(body["tools"][0])
    one["name"] = "look_around"
    body["tools"].insert(1, one)
    cause = ask(server, shape, f"more-{make.__name__}", body)
    assert cause["cause"] == "inserted", cause
    assert cause["missed_tokens"] > 0
    assert "look" in cause["ours_text"]


@pytest.mark.parametrize("make", [Codex, *slow([ClaudeCode])])
def test_tools_in_another_order_are_named(server: RealServer, make: type[Shape]) -> None:
    shape = make()
    add_step(shape, 1)
    body = shape.body()
    ask(server, shape, f"order-{make.__name__}", body)
    body["tools"][:2] = reversed(body["tools"][:2])
    cause = ask(server, shape, f"other-{make.__name__}", body)
    assert cause["cause"] == "reordered", cause
