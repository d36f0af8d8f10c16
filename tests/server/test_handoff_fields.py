"""Whose KV a request may name: only that of servers that the operator trusts is found by other
requests, and nothing that a client writes there ends in more than a refusal."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from weft.config.engine import EngineConfig
from weft.messages.handoff import HandoffParams
from weft.messages.requests import GenerateRequest

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
}


def sglang(host: Any = "127.0.0.1", port: Any = 8998, room: Any = 5) -> dict[str, Any]:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def vllm(host: Any = "127.0.0.1", port: Any = 8998, room: Any = "5") -> dict[str, Any]:
    named = {"remote_host": host, "remote_port": port, "remote_request_id": room}
    return {"kv_transfer_params": {"do_remote_prefill": True, **named}}


class Decoding:
    """A decode server, whose engine does not take anything from anywhere."""

    def __init__(self, stack: ExitStack, **options: str) -> None:
        config = EngineConfig(disaggregation_mode="decode", **options)
        self.server: RunningServer = stack.enter_context(running(settings=asdict(config)))

    def ask(self, path: str = "/generate", **fields: Any) -> httpx.Response:
        body = BODIES[path] | fields
        return httpx.post(self.server.url + path, json=body, timeout=HANG_S)

    def taken(self, path: str = "/generate", **fields: Any) -> GenerateRequest:
        """What the engine gets."""
        answer = self.ask(path, **fields)
        assert answer.status_code == 200, answer.text
        return self.server.engine.seen[-1]


@pytest.fixture(scope="module")
def any_lender() -> Any:
    with ExitStack() as stack:
        yield Decoding(stack)


@pytest.fixture(scope="module")
def named_lender() -> Any:
    with ExitStack() as stack:
        yield Decoding(stack, handoff_lenders="prefill-0, 10.0.0.0/8:9000, *.prefill.svc:*")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("write", [sglang, vllm])
def test_kv_of_a_lender_is_found_only_by_requests_that_name_it(
    any_lender: Decoding, path: str, write: Any
) -> None:
    for salt in ({}, {"cache_salt": "a"}):
        plain = any_lender.taken(path, **salt)
        here = any_lender.taken(path, **salt, **write())
        there = any_lender.taken(path, **salt, **write(port=8999))
        again = any_lender.taken(path, **salt, **write(room="9"))
        assert len({plain.cache_salt, here.cache_salt, there.cache_salt}) == 3
        assert again.cache_salt == here.cache_salt
        assert here.handoff == HandoffParams("5", "127.0.0.1", 8998, plain.cache_salt)


def test_one_client_cannot_name_a_lender_so_that_its_kv_is_found_by_others(
    any_lender: Decoding,
) -> None:
    """No host that is accepted, and no salt beside it, gives the salt of somebody else."""
    others = {
        any_lender.taken(**victim).cache_salt
        for victim in ({}, sglang(), sglang() | {"cache_salt": "a"}, {"cache_salt": "a"})
    }
    for host in ("127.0.0.2", "localhost", "a", "::1"):
        for salt in ("", "a", "127.0.0.1:8998\0", "\0lent by 127.0.0.1:8998\0"):
            own = any_lender.taken(**sglang(host, 7), cache_salt=salt)
            assert own.cache_salt not in others
    assert any_lender.ask(**sglang("127.0.0.1:8998\0x")).status_code == 400


@pytest.mark.parametrize("option", ["handoff_lenders", "handoff_secret"])
def test_kv_of_servers_that_the_operator_trusts_is_found_by_all(option: str) -> None:
    with ExitStack() as stack:
        decoding = Decoding(stack, **{option: "127.0.0.1"})
        named = decoding.taken(**sglang(), cache_salt="a")
        assert named.cache_salt == "a"
        assert named.handoff == HandoffParams("5", "127.0.0.1", 8998)


@pytest.mark.parametrize("write", [sglang, vllm])
@pytest.mark.parametrize(
    ("host", "port"),
    [("prefill-0", 8998), ("PREFILL-0.", 8998), ("10.1.2.3", 9000), ("a.b.prefill.svc", 1)],
)
def test_the_lenders_of_the_operator_may_be_named(
    named_lender: Decoding, write: Any, host: str, port: int
) -> None:
    handoff = named_lender.taken(**write(host, port)).handoff
    assert handoff is not None
    assert handoff.port == port


@pytest.mark.parametrize("write", [sglang, vllm])
@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("prefill-0", 8999),
        ("prefill-00", 8998),
        ("prefill-0.evil.example", 8998),
        ("10.1.2.3", 8998),
        ("11.1.2.3", 9000),
        ("prefill.svc", 1),
        ("xprefill.svc", 1),
        ("127.0.0.1", 8998),
        ("localhost", 8998),
    ],
)
def test_other_lenders_are_refused_before_anybody_is_asked(
    named_lender: Decoding, write: Any, host: str, port: int
) -> None:
    before = len(named_lender.server.engine.seen)
    answer = named_lender.ask(**write(host, port))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "--handoff-lenders" in error["message"]
    assert host in error["message"]
    assert error["param"] in ("bootstrap_host", "kv_transfer_params.remote_host")
    assert len(named_lender.server.engine.seen) == before


@pytest.mark.parametrize("write", [sglang, vllm])
@pytest.mark.parametrize(
    "host",
    [
        *("a..b", ".", "..", "", "a" * 64, "a." * 127, "-a", "127.1", "0x7f000001", "2130706433"),
        *("ex\u00e4mple", "a b", "a\0b", "a/b", "a:b", "::1%lo", "1.2.3.4.5"),
        *(7, None, True, {}, "x" * 100_000, "[" * 1_000),
    ],
)
def test_an_invalid_host_is_refused_by_name(any_lender: Decoding, write: Any, host: Any) -> None:
    before = len(any_lender.server.engine.seen)
    answer = any_lender.ask(**write(host))
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1_000
    assert len(any_lender.server.engine.seen) == before


@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_each_prompt_of_a_batch_has_a_room_of_its_own(
    any_lender: Decoding, num_prompts: int
) -> None:
    texts = [f"Hello {number}" for number in range(num_prompts)]
    taken = []
    for rooms in (5, list(range(num_prompts))):
        assert any_lender.ask(text=texts, **sglang(room=rooms)).status_code == 200
        seen = any_lender.server.engine.seen[-num_prompts:]
        taken.append([one.handoff.room for one in seen if one.handoff is not None])
    assert len(set(taken[0])) == num_prompts
    assert taken[1] == [str(number) for number in range(num_prompts)]
    assert any_lender.ask(text=texts, **sglang(room=[1] * 9)).status_code == 400


def test_a_prefill_server_tells_where_its_kv_is_as_vllm_does() -> None:
    config = EngineConfig(disaggregation_mode="prefill")
    with running(settings=asdict(config)) as server:
        body = {**BODIES["/v1/completions"], "kv_transfer_params": {"do_remote_decode": True}}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=HANG_S).json()
        told = answer["kv_transfer_params"]
        (seen,) = server.engine.seen
        assert seen.handoff == HandoffParams(told["remote_request_id"])
        assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
        assert told["remote_host"] == "127.0.0.1"
        assert told["remote_port"] == 8998
