"""Why a prompt missed the cache, over HTTP and on the command line, with a model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake import RunningServer, running
from tests.server.real_engine import RealServer, serving
from weft.cli.why import causes
from weft.client.requests import pack_ids
from weft.config.server import ServerConfig
from weft.engine.causes import Cause
from weft.messages.codec import ToEngine
from weft.messages.control import ExplainRequest, ExplainRequestReply
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams

NANO = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
RULES = "Answer in one word. Never say why. Write names in full, and dates as numbers. " * 6


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serving(NANO, kv_tokens=4096, page_size=16) as it:
        yield it


def ask(server: RealServer, rid: str, prompt: str) -> None:
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=1, rid=rid)
    assert answer.status_code == 200, answer.text


def test_a_date_in_the_prompt_is_shown_with_its_price(server: RealServer) -> None:
    ask(server, "morning", f"Today is the 27th. {RULES}")
    ask(server, "evening", f"Today is the 28th. {RULES}")
    answer = server.get("/requests/evening").json()
    cause = answer["requests"][0]["cache_cause"]
    assert cause["cause"] == "changed"
    assert cause["rid"] == "morning"
    assert "28" in cause["ours_text"].replace(" ", "") or cause["ours_text"].startswith("8")
    assert cause["ours_text"] != cause["theirs_text"]
    assert cause["missed_tokens"] > 100
    assert cause["missed_s"] > 0
    lines = list(causes(answer))
    assert lines[0].startswith("evening (request ")
    assert lines[1].startswith("  cache: changed: its first ")
    assert any(line.startswith("  cost: ") for line in lines)
    assert f"  advice: {cause['advice']}" in lines


def test_a_prompt_that_was_found_has_no_price(server: RealServer) -> None:
    ask(server, "first", f"Once. {RULES}")
    ask(server, "second", f"Once. {RULES}")
    answer = server.get("/requests/second").json()
    cause = answer["requests"][0]["cache_cause"]
    assert cause["cause"] == "found"
    assert cause["missed_tokens"] == 0
    assert cause["advice"] == ""
    assert "  cache: found: all that could come from the cache did" in causes(answer)
    assert not any(line.startswith("  cost: ") for line in causes(answer))


def test_a_prompt_of_another_namespace_has_a_price_and_no_text_that_parts(
    server: RealServer,
) -> None:
    ask(server, "theirs", f"Salt. {RULES}")
    answer = server.post(
        "/v1/completions", prompt=f"Salt. {RULES}", max_tokens=1, rid="ours", cache_salt="x"
    )
    assert answer.status_code == 200, answer.text
    lines = list(causes(server.get("/requests/ours").json()))
    [_, cause, cost, advice, _] = lines[:5]
    assert cause.startswith("  cache: other namespace: ")
    assert cost.startswith("  cost: ")
    assert advice.startswith("  advice: use the same cache_salt")


# In the answer of the request itself


MESSAGES = [{"role": "user", "content": f"Told at once. {RULES}"}]


def chat(server: RealServer, path: str, **wishes: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 3, "return_cache_cause": True, **wishes}
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer


def last_usage(text: str) -> Any:
    """The last usage in a stream of events."""
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for event in reversed(found):
        if event.get("usage"):
            return event["usage"]
        if event.get("response", {}).get("usage"):
            return event["response"]["usage"]
        if event.get("meta_info", {}).get("finish_reason"):
            return event["meta_info"]
    raise AssertionError(text)


def test_every_api_tells_the_cause_where_it_tells_what_was_cached(server: RealServer) -> None:
    chat(server, "/v1/chat/completions")
    usage = {"include_usage": True}
    few = {"num_predict": 3}
    ask = {"max_tokens": 3, "return_cache_cause": True}
    said = {"text": RULES, "sampling_params": {"max_new_tokens": 3}, "return_cache_cause": True}
    posted = [
        chat(server, "/v1/chat/completions").json()["usage"]["prompt_tokens_details"],
        last_usage(chat(server, "/v1/chat/completions", stream=True, stream_options=usage).text)[
            "prompt_tokens_details"
        ],
        chat(server, "/v1/messages").json()["usage"],
        last_usage(chat(server, "/v1/messages", stream=True).text),
        server.post("/v1/completions", prompt=RULES, **ask).json()["usage"][
            "prompt_tokens_details"
        ],
        last_usage(
            server.post(
                "/v1/completions", prompt=[RULES, RULES], stream=True, stream_options=usage, **ask
            ).text
        )["prompt_tokens_details"],
        server.post(
            "/v1/responses", input=RULES, max_output_tokens=16, return_cache_cause=True
        ).json()["usage"]["input_tokens_details"],
        last_usage(
            server.post(
                "/v1/responses",
                input=RULES,
                max_output_tokens=16,
                return_cache_cause=True,
                stream=True,
            ).text
        )["input_tokens_details"],
        chat(server, "/api/chat", stream=False, options=few).json(),
        json.loads(chat(server, "/api/chat", options=few).text.splitlines()[-1]),
        server.post("/generate", **said).json()["meta_info"],
        last_usage(server.post("/generate", stream=True, **said).text),
    ]
    for told in posted:
        assert told["cache_cause"]["cause"] in set(Cause), told
        assert {"missed_tokens", "missed_s", "words", "advice"} < set(told["cache_cause"])


def test_a_request_that_does_not_ask_is_told_nothing_and_asks_the_engine_nothing() -> None:
    with running() as fake:
        asked = count_questions(fake)
        body = {"prompt": "a", "max_tokens": 1}
        usage = httpx.post(f"{fake.url}/v1/completions", json=body).json()["usage"]
        assert "cache_cause" not in usage["prompt_tokens_details"]
        assert asked == []


def test_an_engine_that_does_not_know_ends_no_request() -> None:
    with running() as fake:
        asked = count_questions(fake)
        body = {"prompt": "a", "max_tokens": 1, "return_cache_cause": True}
        usage = httpx.post(f"{fake.url}/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cache_cause"] is None
        (one,) = asked
        assert one.number >= 0


@pytest.mark.parametrize(
    ("config", "viewers"),
    [
        # Nobody knows whose requests are whose, whatever name a client gives.
        ({}, (None, "", "")),
        ({"tenant_by": "user"}, (None, "", "")),
        ({"api_key": "secret"}, ("key-2bb80d53", "key-2bb80d53", "key-2bb80d53")),
        (
            {"api_key": "secret", "tenant_by": "user"},
            ("key-2bb80d53", "key-2bb80d53", "key-2bb80d53/ann"),
        ),
        ({"admin_api_key": "secret"}, (None, None, None)),
    ],
    ids=["no-key", "no-key-by-user", "key", "key-by-user", "admin-key"],
)
def test_the_owner_of_a_key_reads_of_its_requests_and_the_administrator_of_all(
    config: dict[str, Any], viewers: tuple[str | None, ...]
) -> None:
    with running(ServerConfig(drain_s=1.0, **config)) as fake:
        asked = count_questions(fake)
        body = {"prompt": "a", "max_tokens": 1, "return_cache_cause": True}
        url = f"{fake.url}/v1/completions"
        key = {"authorization": "Bearer secret"}
        far = {**key, "x-forwarded-for": "10.0.0.7"}
        for headers, sent in ((key, {}), (far, {}), (far, {"user": "ann"})):
            assert httpx.post(url, json={**body, **sent}, headers=headers).status_code == 200
        assert tuple(one.viewer for one in asked) == viewers


def count_questions(fake: RunningServer) -> list[ExplainRequest]:
    """The questions that the engine gets; it remembers nothing."""
    asked: list[ExplainRequest] = []
    send = fake.engine.send

    def answer(message: ToEngine) -> None:
        if isinstance(message, ExplainRequest):
            asked.append(message)
            fake.engine.answer(ExplainRequestReply(call=message.call, found=[]))
        else:
            send(message)

    fake.engine.send = answer  # type: ignore[method-assign]
    return asked


# Where the time went


@pytest.mark.parametrize("stream", [False, True])
def test_the_parts_of_the_time_are_all_of_it(server: RealServer, stream: bool) -> None:
    rid = f"timed-{stream}"
    chat(server, "/v1/chat/completions", rid=rid, stream=stream, max_tokens=20)
    (one,) = server.get(f"/requests/{rid}").json()["requests"]
    assert server.get(f"/requests/chatcmpl-{rid}").json()["requests"] == [one]
    parts = {part["part"]: part["seconds"] for part in one["times"]}
    assert min(parts.values()) > -1e-4
    assert sum(parts.values()) == pytest.approx(one["total_s"], rel=1e-6)
    assert {"read", "parse", "render", "tokenize", "prefill", "decode", "sending"} < set(parts)
    assert next(iter(parts)) == "read"
    assert list(parts)[-2:] == ["dispatch", "sending"]
    lines = list(causes({"requests": [one]}))
    assert any(line.startswith("  time: ") for line in lines)
    assert any(line.startswith("    prefill ") for line in lines)


SAID = [{"role": "user", "content": "Say it."}]
SHORT = {"max_tokens": 3}
KINDS: list[tuple[str, str, dict[str, Any], int]] = [
    ("several", "/v1/completions", {"prompt": "a b", "n": 3, **SHORT}, 3),
    ("prompts", "/v1/completions", {"prompt": ["a", "b c"], "stream": True, **SHORT}, 2),
    ("stopped", "/v1/completions", {"prompt": "a b c", "max_tokens": 30, "stop": ["e"]}, 1),
    ("flex", "/v1/chat/completions", {"messages": SAID, "service_tier": "flex", **SHORT}, 1),
    ("session", "/v1/completions", {"prompt": "a", "session_params": {"id": "s"}, **SHORT}, 1),
    ("grammar", "/v1/completions", {"prompt": "a", "guided_choice": ["yes", "no"]}, 1),
    ("response", "/v1/responses", {"input": "a b", "max_output_tokens": 16}, 1),
    ("streamed", "/v1/responses", {"input": "a", "max_output_tokens": 16, "stream": True}, 1),
    ("message", "/v1/messages", {"messages": SAID, **SHORT}, 1),
    ("ollama", "/api/chat", {"messages": SAID, "stream": False}, 1),
    ("ollama-text", "/api/generate", {"prompt": "a b"}, 1),
    ("sglang", "/generate", {"text": "a b", "sampling_params": {"max_new_tokens": 3}}, 1),
    ("scores", "/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}, 2),
]


@pytest.mark.parametrize(("name", "path", "body", "num"), KINDS, ids=[name for name, *_ in KINDS])
def test_in_each_api_the_parts_are_all_of_the_time_that_a_client_waits(
    server: RealServer, name: str, path: str, body: dict[str, Any], num: int
) -> None:
    if name == "session":
        server.post("/open_session", capacity_of_str_len=1_000, session_id="s")
    sent = server.http.post(path, json=body, headers={"x-request-id": name})
    began_s = time.perf_counter()
    answer = server.wait(sent)
    measured_s = time.perf_counter() - began_s
    assert answer.status_code == 200, answer.text
    found = server.get(f"/requests/{answer.headers['x-request-id']}").json()["requests"]
    assert len(found) == num
    for one in found:
        parts = [(part["part"], part["seconds"]) for part in one["times"]]
        assert min(seconds for _, seconds in parts) > 0
        assert sum(seconds for _, seconds in parts) == pytest.approx(one["total_s"], rel=1e-6)
        assert one["total_s"] < measured_s
        assert parts[-1][0] == "sending", "its end is known"
        if path != "/v1/score":
            assert 0 < one["first_token_s"] < one["total_s"]


def test_a_response_in_the_background_ends_when_it_is_stored(server: RealServer) -> None:
    answer = server.post("/v1/responses", input="a b", max_output_tokens=16, background=True)
    id = answer.json()["id"]
    while server.get(f"/v1/responses/{id}").json()["status"] not in ("completed", "incomplete"):
        server.wait(asyncio.sleep(0))
    (one,) = server.get(f"/requests/{id}").json()["requests"]
    assert one["times"][-1]["part"] == "sending"
    again = server.get(f"/requests/{id}").json()["requests"]
    assert again[0]["total_s"] == one["total_s"], "it does not go on"


def post(server: RealServer, headers: dict[str, str], **body: Any) -> httpx.Response:
    work = server.http.post("/v1/completions", json={"prompt": "Sent.", **body}, headers=headers)
    return server.wait(work)


def test_what_the_front_of_several_servers_says_is_told(server: RealServer) -> None:
    words = "http://b had about 64 tokens more of its prompt"
    answer = post(server, {"x-weft-elsewhere": words}, max_tokens=1, rid="routed")
    assert answer.status_code == 200
    assert f"  route: {words}" in causes(server.get("/requests/routed").json())


def test_why_of_a_request_that_was_refused_is_its_refusal(server: RealServer) -> None:
    refused = post(server, {"x-request-id": "refused"}, max_tokens=-5)
    assert refused.status_code == 400
    answer = server.get("/requests/refused").json()
    (one,) = answer["refused"]
    assert (one["status"], "max_tokens is -5" in one["message"]) == (400, True)
    assert {part["part"] for part in one["times"]} >= {"read", "parse"}


def test_a_name_that_was_refused_and_then_answered_has_both_histories(server: RealServer) -> None:
    post(server, {"x-request-id": "again"}, max_tokens=-5)
    post(server, {"x-request-id": "again"}, max_tokens=2)
    lines = list(causes(server.get("/requests/again").json()))
    assert lines[0].startswith("again (request ")
    assert any(line.startswith("again: /v1/completions answered with 400, ") for line in lines)


def test_why_of_a_request_that_the_engine_refused_is_its_refusal(server: RealServer) -> None:
    many = [5] * 3_000
    message = GenerateRequest(
        id=900_001,
        rid="too-long",
        input_ids=pack_ids(many, 4_000),
        sampling=SamplingParams(max_new_tokens=4_000),
    )
    server.engine.submit(message)
    server.engine.step()
    lines = list(causes(server.get("/requests/too-long").json()))
    assert lines[-1].startswith("  finished: refused: the prompt has 3,000 tokens")


def test_who_finds_the_queue_full_or_runs_too_long_has_a_history() -> None:
    with serving(
        NANO, kv_tokens=1024, max_running_requests=1, max_queued_requests=1, max_run_s=0.000_001
    ) as server:

        async def sent(rid: str) -> httpx.Response:
            body = {"prompt": "Sent.", "max_tokens": 50, "ignore_eos": True}
            headers = {"x-request-id": rid}
            return await server.http.post("/v1/completions", json=body, headers=headers)

        async def all_sent() -> list[httpx.Response]:
            return await asyncio.gather(*(sent(f"r{number}") for number in range(4)))

        answers = server.wait(all_sent())
        statuses = {answer.status_code for answer in answers}
        assert statuses == {408, 503}
        for answer in answers:
            rid = answer.headers["x-request-id"]
            told = server.get(f"/requests/{rid}").json()
            assert len(told["requests"]) + len(told["refused"]) == 1, "one history"
            lines = "\n".join(causes(told))
            assert answer.json()["error"]["message"] in lines
            for one in told["requests"] + told["refused"]:
                total_s = sum(part["seconds"] for part in one["times"])
                assert total_s == pytest.approx(one["total_s"], rel=1e-6)


def test_blocks_that_are_read_from_the_disk_are_a_part_of_the_time(tmp_path: Path) -> None:
    # Such short chunks do not teach how fast prompts are computed, so a request waits for what is
    # stored, however slow that is.
    patient: dict[str, Any] = {"chunked_prefill_size": 32, "cache_wait_ms": 240_000}
    stored: dict[str, Any] = {"cache_dir": str(tmp_path), "cache_write": "through"}
    with serving(NANO, kv_tokens=4096, **stored, **patient) as server:
        while server.get("/cache").json()["disk"] != "open":
            server.wait(asyncio.sleep(0.01))
        ask(server, "first", RULES)
        (first,) = server.get("/requests/first").json()["requests"]
        blocks = (first["prompt_tokens"] - 1) // 64
        while server.get("/cache").json()["disk_blocks"] < blocks:
            server.wait(asyncio.sleep(0.01))
        assert server.post("/flush_cache").status_code == 200
        ask(server, "again", RULES)
        (again,) = server.get("/requests/again").json()["requests"]
    assert again["cached_tokens"] == 64 * blocks
    assert again["cache_cause"]["cause"] in ("found", "emptied")
    parts = {part["part"]: part["seconds"] for part in again["times"]}
    assert parts["stored"] > 0
    assert sum(parts.values()) == pytest.approx(again["total_s"], rel=1e-6)
