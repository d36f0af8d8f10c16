"""A prefill and a decode server, as processes: the answers of one server, whatever becomes of the
other one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.handoff_proof import Trio, ask, come_to_rest, compare, numbers, plain
from tests.e2e.server import Server
from tests.launch.tiny_model import write_model_with
from tests.seeds import slow

PROMPT = [10 + number * 37 % 4_000 for number in range(200)]
BODY = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    made = Trio()
    yield made
    made.stop()


def test_both_answer_as_one_server_does(trio: Trio) -> None:
    count, wrong = compare(trio, random.Random(5), 7)
    assert count["right"] == 7
    assert wrong == []
    assert numbers(trio.decode)["handoff_tokens_total"] > 0
    assert come_to_rest(trio)


def cached(answer: Any) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def computed_by(server: Server, body: dict[str, Any]) -> Any:
    """What the server answers when it finds nothing, here or elsewhere."""
    answer = ask(server.url, "/generate", {**body, "cache_salt": "computed"})
    assert cached(answer) == 0
    return plain(answer)


def test_kv_of_a_server_that_only_a_client_has_named_is_not_found_by_others(trio: Trio) -> None:
    body = {**BODY, "cache_salt": "apart"}
    assert cached(trio.both("/generate", body)) == 192
    assert cached(ask(trio.decode.url, "/generate", body)) == 0
    assert cached(trio.both("/generate", body)) >= 192


def test_vllms_fields_lead_from_one_server_to_the_other(trio: Trio) -> None:
    first = {**BODY, "kv_transfer_params": {"do_remote_decode": True}, "cache_salt": "vllm"}
    place = ask(trio.prefill.url, "/generate", first)["kv_transfer_params"]
    assert place["do_remote_prefill"]
    second = {**BODY, "kv_transfer_params": place, "cache_salt": "vllm"}
    answer = ask(trio.decode.url, "/generate", second)
    assert answer["meta_info"]["cached_tokens"] == 192
    assert plain(answer) == plain(ask(trio.alone.url, "/generate", BODY))


def test_what_cannot_be_handed_over_is_refused_by_name(trio: Trio) -> None:
    assert ask(trio.alone.url, "/generate", {**BODY, **trio.place()}) == 400
    session = {"session_params": {"id": "s"}}
    assert ask(trio.decode.url, "/generate", {**BODY, **trio.place(), **session}) == 400
    for wrong in ({"bootstrap_room": -1}, {"bootstrap_port": 0}, {"bootstrap_host": 7}):
        assert ask(trio.decode.url, "/generate", {**BODY, **trio.place(), **wrong}) == 400


def test_through_the_front_both_answer_as_one_server_does(trio: Trio) -> None:
    trio.open_front()
    before = numbers(trio.decode)["handoff_tokens_total"]
    count, wrong = compare(trio, random.Random(325), 5)
    assert count["right"] == 5
    assert wrong == []
    assert numbers(trio.decode)["handoff_tokens_total"] > before
    assert come_to_rest(trio)
    assert trio.front is not None
    trio.front.stop()
    trio.front = None


def test_without_the_prefill_server_prompts_are_computed(trio: Trio) -> None:
    trio.prefill.stop()
    body = {**BODY, "cache_salt": "alone"}
    answer = ask(trio.decode.url, "/generate", {**body, **trio.place()})
    assert answer["meta_info"]["cached_tokens"] == 0
    assert plain(answer) == plain(ask(trio.alone.url, "/generate", body))
    assert numbers(trio.decode)["handoff_fallback_totalunreachable"] == 1


@pytest.mark.parametrize("layers", ["states", *slow(["windows"])])
def test_prompts_of_other_layers_are_handed_over_between_servers_that_share_a_secret(
    layers: str, tmp_path: Path
) -> None:
    secret = ("--handoff-secret", "a secret of both", "--handoff-lenders", "127.0.0.1")
    trio = Trio(*secret, model=str(write_model_with(layers, tmp_path)))
    try:
        for number, length in enumerate([5, 17, 33, 64, 150]):
            prompt = [(number * 31 + 37 * place) % 200 for place in range(length)]
            sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = trio.both("/generate", body)
            assert cached(answer) == (length - 1) // 8 * 8
            assert plain(answer) == computed_by(trio.decode, body)
            # What comes from a named server with the secret is found by all.
            assert cached(ask(trio.decode.url, "/generate", body)) >= cached(answer)
        for other in ({"bootstrap_host": "127.0.0.2"}, {"bootstrap_port": 1}):
            assert ask(trio.decode.url, "/generate", {**body, **trio.place(), **other}) == 400
        found = numbers(trio.decode)
        assert found["handoff_tokens_total"] == 16 + 32 + 56 + 144
        assert found["handoff_faults_total"] == 0
        assert come_to_rest(trio)
        for server in (trio.prefill, trio.decode):
            assert server.post("/audit")["faults"] == []
    finally:
        trio.stop()
