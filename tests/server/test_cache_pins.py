"""Pinning and forgetting prompts over HTTP, with a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S
from tests.server.fake import RunningServer as Frontend
from tests.server.real_engine import RealServer, serving
from weft.cli.ctl import answers
from weft.messages.codec import encode

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


def test_invalid_pins_are_refused_with_the_reason(server: RealServer) -> None:
    long = list(range(100, 228)) * 10
    answer = server.post("/cache/pin", input_ids=long)
    assert answer.status_code == 400
    message = "it is not pinned: 1,280 tokens are more than the 1,024 that may be pinned"
    assert answer.json()["error"]["message"] == message
    assert "less than a page" in server.post("/cache/pin", prompt="x").json()["error"]["message"]
    for body in ({}, {"prompt": "x", "input_ids": [1]}):
        answer = server.post("/cache/pin", **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(
            "one of messages, prompt, input_ids and node"
        )
    assert server.post("/cache/pin", prompt="x", ttl_s=0).status_code == 400
    assert server.post("/cache/pin", prompt="x", name="a/b").status_code == 400
    assert pins(server) == []


def test_a_pin_with_a_name_takes_another_prompt_under_the_same_name(server: RealServer) -> None:
    for number in range(2):
        server.post("/cache/pin", prompt=f"{number} {TEXT}", name="mine", cache_salt="s")
    assert pins(server) == ["mine"]
    assert delete(server, "mine") == 200


# ---- forgetting


def cached(server: RealServer, prompt: str, **more: Any) -> int:
    """How much of a prompt is found."""
    usage = server.post("/v1/completions", prompt=prompt, max_tokens=1, **more).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_is_forgotten_with_all_that_goes_on_from_it(server: RealServer) -> None:
    first = f"forget me: {TEXT}"
    for more in ("a", "b", "a"):
        found = cached(server, first + more, cache_salt="f")
    assert found >= 64
    num_first = len(server.tokenizer.encode(first)) // 16 * 16
    assert server.post("/cache/forget", prompt=first).status_code == 400, "another salt"
    kept = server.post("/cache/forget", prompt=first, cache_salt="f", keep=32).json()
    assert kept["tokens"] == num_first - 32
    assert kept["left"] == 32
    assert cached(server, first, cache_salt="f") == 32
    gone = server.post("/cache/forget", prompt=first, cache_salt="f").json()
    assert (gone["tokens"], gone["left"]) == (num_first, 0)
    assert cached(server, first, cache_salt="f") == 0
    server.post("/cache/pin", prompt=first, cache_salt="f", name="kept")
    refused = server.post("/cache/forget", prompt=first, cache_salt="f")
    assert refused.status_code == 409
    assert "cached tokens are in use" in refused.json()["error"]["message"]
    assert delete(server, "kept") == 200
    for body in ({}, {"prompt": "x", "node": 1}, {"prompt": "x", "keep": -1}):
        assert server.post("/cache/forget", **body).status_code == 400


# ---- the tree


def test_the_tree_shows_what_prompts_share_and_what_pins_keep(server: RealServer) -> None:
    first = f"of the tree: {TEXT}"
    for more in ("a" * 40, "b" * 40):
        server.post("/v1/completions", prompt=first + more, max_tokens=1)
    server.post("/cache/pin", prompt=first, name="seen")
    answer = server.get("/cache/tree").json()
    assert answer["whole"]
    assert answer["visited"] >= len(answer["nodes"])
    [shared] = [one for one in answer["nodes"] if one["text"].startswith("of the tree")]
    assert shared["locks"] == 1
    assert shared["tokens"] % 16 == 0
    place = answer["nodes"].index(shared)
    below = [one for one in answer["nodes"][place + 1 :] if one["depth"] == shared["depth"] + 1]
    assert len(below) >= 2
    assert shared["below"] >= shared["tokens"] + sum(one["tokens"] for one in below[:2])
    lines = list(answers.tree(answer))
    assert any("locks 1" in line and '"of the tree: def greet(name):\\n' in line for line in lines)
    assert lines[-1] == f"nodes visited: {answer['visited']}"
    assert delete(server, "seen") == 200


# ---- cache_control


def text(content: str, ttl: str | None = None, *, marked: bool = True) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": content}
    if marked:
        block["cache_control"] = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return block


def ask(server: RealServer, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", **{"max_tokens": 2, "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


HELLO: list[dict[str, Any]] = [{"role": "user", "content": "What does it do?"}]


def total(usage: dict[str, Any]) -> int:
    """All tokens of the prompt, as clients of Anthropic's API add them."""
    return int(
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
    )


def forget(server: RealServer) -> None:
    for name in pins(server):
        delete(server, name)


def test_a_marked_system_prompt_is_created_then_read_and_the_sums_are_right(
    server: RealServer,
) -> None:
    system = [text("Say what the code does.", marked=False), text(f"a {TEXT}")]
    plain = {"system": "\n".join(block["text"] for block in system), "messages": HELLO}
    num_prompt = server.post("/v1/messages/count_tokens", **plain).json()["input_tokens"]
    first = ask(server, system=system)
    created = first["cache_creation_input_tokens"]
    assert created % 16 == 0
    assert num_prompt - 40 < created < num_prompt
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": created,
        "ephemeral_1h_input_tokens": 0,
    }
    assert (first["cache_read_input_tokens"], total(first)) == (0, num_prompt)
    second = ask(server, system=system)
    assert second["cache_read_input_tokens"] >= created
    assert second["cache_creation_input_tokens"] == 0
    assert total(second) == num_prompt
    [pin] = server.get("/cache").json()["pins"]
    assert (pin["tokens"], pin["ttl_s"], pin["uses"]) == (created, 300, 2)
    forget(server)


def test_a_mark_changes_no_token_of_the_prompt(server: RealServer) -> None:
    plain = ask(server, system=f"b {TEXT}")
    marked = ask(server, system=[text(f"b {TEXT}")])
    assert total(plain) == total(marked)
    # All of it is found that the plain request has left.
    assert marked["cache_read_input_tokens"] == total(plain) - 1
    forget(server)


def test_each_time_to_live_counts_apart(server: RealServer) -> None:
    messages = [{"role": "user", "content": [text(f"c {TEXT}"), text("Why?", marked=False)]}]
    usage = ask(server, system=[text(f"d {TEXT}", "1h")], messages=messages)
    kinds = usage["cache_creation"]
    assert kinds["ephemeral_1h_input_tokens"] > 100
    assert kinds["ephemeral_5m_input_tokens"] > 100
    assert sum(kinds.values()) == usage["cache_creation_input_tokens"]
    found = server.get("/cache").json()["pins"]
    assert sorted(pin["ttl_s"] for pin in found) == [300, 3_600]
    forget(server)


def test_a_mark_at_a_tool_pins_its_description(server: RealServer) -> None:
    # The template knows no tools, so the system's text describes them.
    tool = {"name": "look", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
    usage = ask(server, tools=[tool], tool_choice={"type": "none"}, system=f"e {TEXT}")
    assert usage["cache_creation_input_tokens"] > 100
    forget(server)


def test_a_mark_at_what_the_template_leaves_out_pins_nothing(tool_server: Frontend) -> None:
    tool = {"name": "look", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    answer = httpx.post(f"{tool_server.url}/v1/messages", json=body, timeout=HANG_S)
    assert answer.status_code == 200
    assert not tool_server.engine.seen[-1].pins


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"system": [text("a")] * 5},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"system": [text("a")] * 4, "cache_control": {"type": "ephemeral"}},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {
                "system": [text("a")],
                "messages": [{"role": "user", "content": [text("x", "1h")]}],
            },
            "messages.0.content.0.cache_control.ttl: a ttl='1h' cache_control block must not come after a "
            "ttl='5m' cache_control block. Note that blocks are processed in the following order: `tools`, "
            "`system`, `messages`.",
        ),
        (
            {"messages": [{"role": "user", "content": [text("")]}]},
            "messages.0.content.0.text: cache_control cannot be set for empty text blocks",
        ),
        (
            {
                "messages": [{"role": "user", "content": [text("x", "1h")]}],
                "cache_control": {"type": "ephemeral"},
            },
            "cache_control: its ttl is '5m', and that of the last block (messages.0.content.0) is '1h'",
        ),
    ],
)
def test_wrong_marks_are_refused_in_the_words_of_anthropics_api(
    server: RealServer, body: dict[str, Any], message: str
) -> None:
    answer = server.post("/v1/messages", **{"max_tokens": 2, "messages": HELLO, **body})
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": message}


@pytest.mark.parametrize("control", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, {}])
def test_a_mark_of_another_kind_names_what_is_allowed(
    server: RealServer, control: dict[str, str]
) -> None:
    block = {"type": "text", "text": "x", "cache_control": control}
    answer = server.post("/v1/messages", max_tokens=1, messages=HELLO, system=[block])
    assert answer.status_code == 400
    assert "cache_control" in answer.json()["error"]["message"]


def test_the_body_as_a_whole_marks_its_last_block(server: RealServer) -> None:
    usage = ask(server, system=f"i {TEXT}", cache_control={"type": "ephemeral", "ttl": "1h"})
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 100
    assert usage["input_tokens"] < 32
    forget(server)


@pytest.mark.parametrize("place", ["part", "message", "body"])
def test_chat_requests_may_be_marked_too(server: RealServer, place: str) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    content: Any = f"{place} {TEXT}"
    system: dict[str, Any] = {"role": "system", "content": content}
    body: dict[str, Any] = {"messages": [system, {"role": "user", "content": "Why?"}]}
    match place:
        case "part":
            system["content"] = [{"type": "text", "text": content} | control]
        case "message":
            system |= control
        case "body":
            body |= control
    first = server.post("/v1/chat/completions", **body, max_tokens=2)
    assert first.status_code == 200, first.text
    details = first.json()["usage"]["prompt_tokens_details"]
    assert details["cache_write_tokens"] > 100
    again = server.post("/v1/chat/completions", **body, max_tokens=2, stream=True)
    assert again.status_code == 200
    [pin] = server.get("/cache").json()["pins"]
    assert pin["uses"] == 2
    assert pin["tokens"] >= details["cache_write_tokens"]
    forget(server)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("place", ["part", "body"])
def test_a_cut_prompt_pins_nothing_and_one_that_fits_pins_its_marks(
    server: RealServer, place: str, side: str
) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    part: dict[str, Any] = {"type": "text", "text": f"{place} {side} {TEXT}"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    (part if place == "part" else body).update(control)
    for most, is_pinned in ((64, False), (1_900, True)):
        cut = {"truncate_prompt_tokens": most, "truncation_side": side}
        answer = server.post("/v1/chat/completions", **body, **cut, max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert bool(pins(server)) == is_pinned
    forget(server)


def test_the_answer_to_a_plain_request_does_not_mention_pins(server: RealServer) -> None:
    answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=2).json()
    assert set(answer["usage"]["prompt_tokens_details"]) == {"cached_tokens"}
    [request] = [one for one in server.seen if getattr(one, "pins", None) == ()][-1:]
    assert b"pins" not in encode(request)


# ---- where cached tokens were


def test_usage_tells_where_cached_tokens_were_in_every_api(server: RealServer) -> None:
    prompt = f"details {TEXT}"
    told = {"return_cached_tokens_details": True}
    server.post("/v1/completions", prompt=prompt, max_tokens=1)
    completion = server.post(
        "/v1/completions", prompt=[prompt, prompt], max_tokens=1, **told
    ).json()
    found = completion["usage"]["prompt_tokens_details"]
    cached = found["cached_tokens"]
    assert cached > 200
    assert found["cached_tokens_details"] == {"device": cached, "host": 0, "disk": 0}
    native = server.post("/generate", text=prompt, sampling_params={"max_new_tokens": 1}, **told)
    meta = native.json()["meta_info"]
    assert meta["cached_tokens_details"]["device"] == meta["cached_tokens"] > 100
    messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        chat = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **told).json()
        response = server.post("/v1/responses", input=prompt, max_output_tokens=1, **told).json()
        usage = ask(server, messages=messages, **told)
    for details, num_cached in (
        (chat["usage"]["prompt_tokens_details"], None),
        (response["usage"]["input_tokens_details"], None),
        (usage, usage["cache_read_input_tokens"]),
    ):
        number = details["cached_tokens"] if num_cached is None else num_cached
        assert details["cached_tokens_details"] == {"device": number, "host": 0, "disk": 0}
        assert number > 100
