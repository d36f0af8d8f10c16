"""Bodies of agents in which something is wrong are served, or refused by the name of the item; none
of them is an error of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.agents.attacks import SOUND, WRONG, replaced
from tests.agents.model import scripted_model
from tests.server.fake import HANG_S

DEPTH = 200  # of namespaces in namespaces, and of JSON in arguments


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        scripted_model(lambda prompt: "Done.", context=4_000_000) as (server, _),
        httpx.Client(base_url=server.url, timeout=HANG_S) as client,
    ):
        yield client


@pytest.mark.parametrize("path", SOUND)
def test_a_wrong_value_is_served_or_its_item_is_named(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=SOUND[path]).status_code == 200
    num_refused = 0
    # Each place gets one of the values, and the next place the next one.
    for attack in list(replaced(SOUND[path]))[:: len(WRONG) + 1]:
        answer = client.post(path, json=attack.body)
        if answer.status_code == 200:
            continue
        num_refused += 1
        assert answer.status_code == 400, (attack.name, answer.text)
        error = answer.json()["error"]
        assert attack.item in f"{error['message']} {error.get('param')}", (attack.name, error)
    assert num_refused > 10


@pytest.mark.parametrize(
    ("path", "length"), [*zip(SOUND, (20_000, 2_000, 2_000), strict=True)], ids=SOUND
)
def test_a_tool_list_of_two_megabytes_is_served_and_its_last_tool_is_checked(
    client: httpx.Client, path: str, length: int
) -> None:
    """Of two of the APIs it has a tenth of that."""
    sound = SOUND[path]
    tool = sound["tools"][1 if path == "/v1/messages" else 0]  # a function
    many = []
    for number in range(100):
        changed = json.loads(json.dumps(tool))
        fields = changed.get("function", changed)
        fields["name"] = f"tool_{number}"
        fields["description"] = "Look before you change. " * (length // 24 + 1)
        many.append(changed)
    body = {**sound, "tools": many}
    body = {field: value for field, value in body.items() if field not in ("input", "messages")}
    body["input" if path == "/v1/responses" else "messages"] = [{"role": "user", "content": "Hi"}]
    assert len(json.dumps(body)) > len(many) * length
    assert client.post(path, json=body).status_code == 200
    many[-1].get("function", many[-1])["name"] = "tool_0"
    error = client.post(path, json=body).json()["error"]
    assert "tools[99]" in error["message"]
    assert "already the name of tools[0]" in error["message"]


def test_namespaces_in_namespaces_are_refused_however_deep_they_are(client: httpx.Client) -> None:
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": {}}
    for _ in range(DEPTH):
        tool = {"type": "namespace", "name": "n", "tools": [tool]}
    answer = client.post("/v1/responses", json={"input": "Hi", "tools": [tool]})
    assert answer.status_code == 400
    assert "tools[0].tools[0]" in answer.text or "nested" in answer.text


def test_arguments_of_the_history_may_be_nested_as_deep_as_one_likes(client: httpx.Client) -> None:
    for arguments in ("[" * DEPTH**2, "[" * DEPTH**2 + "]" * DEPTH**2, '{"a":' * DEPTH**2):
        asked = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        body = {"input": [asked, {"role": "user", "content": "Hi"}]}
        assert client.post("/v1/responses", json=body).status_code == 200
