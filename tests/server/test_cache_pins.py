"""Pinning prompts over HTTP, with a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.real_engine import RealServer, serving

NANO = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
TEXT = "def greet(name):\n    return 'Hello, ' + name\n\n" * 12


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serving(NANO, kv_tokens=4096, page_size=16) as it:
        yield it


def pins(server: RealServer) -> list[str]:
    return [pin["name"] for pin in server.get("/cache").json()["pins"]]


def delete(server: RealServer, name: str) -> int:
    return server.wait(server.http.delete(f"/cache/pin/{name}")).status_code


@pytest.mark.parametrize("given", ["prompt", "input_ids", "messages"])
def test_a_prompt_is_pinned_found_and_let_go(server: RealServer, given: str) -> None:
    content = f"{given}: {TEXT}"
    ids = server.tokenizer.encode(content)
    value = {
        "prompt": content,
        "input_ids": ids,
        "messages": [{"role": "user", "content": content}],
    }[given]
    answer = server.post("/cache/pin", name=f"of {given}", ttl_s=60, **{given: value})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["tokens"] == told["prompt_tokens"] // 16 * 16 >= 64
    assert (told["name"], told["ttl_s"], told["cached_tokens"]) == (f"of {given}", 60, 0)
    cache = server.get("/cache").json()
    assert cache["pinned_tokens"] == told["tokens"]
    assert cache["max_pinned_tokens"] == 1024
    [pin] = cache["pins"]
    assert (pin["state"], pin["ttl_s"], pin["uses"]) == ("firm", 60, 1)
    if given == "messages":
        found = server.post("/v1/chat/completions", messages=value, max_tokens=1).json()["usage"]
    else:
        found = server.post("/v1/completions", prompt=value, max_tokens=1).json()["usage"]
    assert found["prompt_tokens_details"]["cached_tokens"] >= told["tokens"] - 16
    assert delete(server, f"of {given}") == 200
    assert delete(server, f"of {given}") == 404
    assert pins(server) == []


def test_what_cannot_be_pinned_is_refused_with_the_reason(server: RealServer) -> None:
    long = list(range(100, 228)) * 10
    answer = server.post("/cache/pin", input_ids=long)
    assert answer.status_code == 400
    message = "it is not pinned: 1,280 tokens are more than the 1,024 that may be pinned"
    assert answer.json()["error"]["message"] == message
    assert "less than a page" in server.post("/cache/pin", prompt="x").json()["error"]["message"]
    for body in ({}, {"prompt": "x", "input_ids": [1]}):
        answer = server.post("/cache/pin", **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("one of messages, prompt and input_ids")
    assert server.post("/cache/pin", prompt="x", ttl_s=0).status_code == 400
    assert server.post("/cache/pin", prompt="x", name="a/b").status_code == 400
    assert pins(server) == []


def test_a_pin_with_a_name_takes_another_prompt_under_the_same_name(server: RealServer) -> None:
    for number in range(2):
        server.post("/cache/pin", prompt=f"{number} {TEXT}", name="mine", cache_salt="s")
    assert pins(server) == ["mine"]
    assert delete(server, "mine") == 200
