"""Input embeddings and hidden states over HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.server.fake import READY, RunningServer, as_bytes

ROWS = [[1.0, 2.0, 3.0], [-0.5, 0.0, 1e-30]]
PACKED = np.array(ROWS, dtype="<f4").tobytes()


def texted(rows: Any) -> str:
    return base64.b64encode(np.array(rows, dtype="<f4").tobytes()).decode()


@pytest.mark.parametrize("embeds", [ROWS, texted(ROWS)], ids=["numbers", "base64"])
def test_embeddings_reach_the_engine_as_float32(
    http: httpx.Client, server: RunningServer, embeds: Any
) -> None:
    answer = http.post(
        "/generate", json={"input_embeds": embeds, "sampling_params": {"max_new_tokens": 2}}
    ).json()
    assert answer["meta_info"]["prompt_tokens"] == 2
    [request] = server.engine.seen
    assert request.vectors == PACKED
    assert request.input_ids == bytes(8)
    assert not request.shares_kv


@pytest.mark.parametrize("as_text", [False, True])
def test_a_batch_of_embeddings_travels_once_and_is_answered_by_a_list(
    http: httpx.Client, server: RunningServer, as_text: bool
) -> None:
    prompts: list[Any] = [ROWS, ROWS[1:], [ROWS[1], ROWS[0]]]
    body = {
        "input_embeds": [texted(one) if as_text else one for one in prompts],
        "sampling_params": {"n": 2},
    }
    answers = http.post("/generate", json=body).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 2, 1, 1, 2, 2]
    expected = [np.array(one, dtype="<f4").tobytes() for one in prompts for _ in range(2)]
    assert [request.vectors for request in server.engine.seen] == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_embeds": [[1, 2]]}, "has the shape [1, 2]; [tokens, 3] is needed"),
        (
            {"input_embeds": [[1, 2, 3], [1, 2]]},
            "not a list of lists of numbers with equal lengths",
        ),
        (
            {"input_embeds": [[1, 2, 3], [1, "2", 3]]},
            "input_embeds[1][1] is '2'; a number is needed",
        ),
        ({"input_embeds": [[1, 2, 3], [1, 2, 1e39]]}, "input_embeds[1][2] is inf"),
        ({"input_embeds": []}, "there is no prompt"),
        ({"input_embeds": [[]]}, "has the shape [1, 0]"),
        ({"input_embeds": [[[[1]]]]}, "nested 4 deep"),
        (
            {"input_embeds": 5},
            "input_embeds is 5; base64, [tokens][size] or a list of these is needed",
        ),
        ({"input_embeds": "AAAA"}, "has 3 bytes"),
        ({"input_embeds": "(no base64)"}, "not base64"),
        ({"input_embeds": ""}, "has the shape [0, 3]"),
        ({"input_embeds": texted([[1, 2, np.nan]])}, "input_embeds[0][2] is nan"),
        ({"input_embeds": ROWS, "text": "a"}, "give one of text, input_ids and input_embeds"),
        (
            {"input_embeds": ROWS, "return_logprob": True, "logprob_start_len": 0},
            "no log probabilities of the prompt",
        ),
        ({"input_embeds": ROWS, "session_params": {"id": "s"}}, "exclude each other"),
        (
            {"text": "a", "return_hidden_states": True, "session_params": {"id": "s"}},
            "of a session's history",
        ),
    ],
)
def test_impossible_values_are_refused_by_name(
    http: httpx.Client, server: RunningServer, body: dict[str, Any], words: str
) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert server.engine.seen == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_embeddings_are_refused_where_they_are_not_served(http: httpx.Client, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input_embeds": ROWS}
    assert http.post(path, json=body).status_code == 400


def test_hidden_states_have_sglangs_form(http: httpx.Client, server: RunningServer) -> None:
    """Those of the prompt as one entry, then one for each token of the output but the last."""
    server.engine.script = lambda ids: as_bytes("abcdefgh")
    body = {
        "text": ["xyz", "pq"],
        "sampling_params": {"max_new_tokens": 3},
        "return_hidden_states": [True, False],
    }
    first, second = http.post("/generate", json=body).json()
    states = [[float(p), p + 0.5, -float(p)] for p in range(5)]
    assert first["meta_info"]["hidden_states"] == [states[:3], states[3], states[4]]
    assert "hidden_states" not in second["meta_info"]
    assert [request.sampling.hidden_states for request in server.engine.seen] == ["all", None]
    assert [request.recompute_from for request in server.engine.seen] == [0, None]


def test_a_stop_string_ends_hidden_states_where_the_tokens_end(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes("abcdefgh")
    sampling = {"max_new_tokens": 8, "stop": "cd"}
    answer = http.post(
        "/generate", json={"text": "x", "sampling_params": sampling, "return_hidden_states": True}
    ).json()
    assert len(answer["meta_info"]["hidden_states"]) == answer["meta_info"]["completion_tokens"]


def test_a_stream_tells_hidden_states_at_its_end(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes("abc")
    body = {
        "text": "xy",
        "sampling_params": {"max_new_tokens": 3},
        "return_hidden_states": True,
        "stream": True,
    }
    lines = [
        line[6:]
        for line in http.post("/generate", json=body).text.splitlines()
        if line.startswith("data: {")
    ]
    *others, last = (json.loads(line)["meta_info"] for line in lines)
    assert len(last["hidden_states"]) == 3
    assert not any("hidden_states" in meta for meta in others)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_and_completions_tell_what_the_last_token_was_sampled_from(
    http: httpx.Client, server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda ids: as_bytes("abc")
    more = {
        "max_tokens": 3,
        "return_hidden_states": True,
        "stream": stream,
        "return_token_ids": True,
    }
    for path, prompt in (
        ("/v1/completions", {"prompt": "xyz"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        server.engine.seen.clear()
        text = http.post(path, json=prompt | more).text
        answers = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [answer["choices"][0] for answer in answers or [json.loads(text)]]
        found = [
            where["hidden_states"]
            for one in choices
            for where in (one, one.get("delta", {}))
            if "hidden_states" in where
        ]
        position = len(server.engine.seen[0].input_ids) // 4 + 1
        assert found == [[position, position + 0.5, -position]]


def test_hidden_states_need_a_server_that_was_started_with_them(
    http: httpx.Client, server: RunningServer
) -> None:
    off = msgspec.structs.replace(READY, gives_hidden_states=False)
    server.call(lambda: server.client.deliver(off))
    try:
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            answer = http.post(path, json={**body, "return_hidden_states": True})
            assert answer.status_code == 400
            assert "--enable-return-hidden-states" in answer.json()["error"]["message"]
    finally:
        server.call(lambda: server.client.deliver(READY))
    assert server.engine.seen == []
