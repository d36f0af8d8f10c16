"""Filling in the middle: a suffix in completions and in Ollama's generate, and llama.cpp's
route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, as_bytes, running
from tests.text.tokens import infill_tokenizer

PRE, SUF, MID, FILE, PAD = range(260, 265)
TOKENIZER = infill_tokenizer(
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"
)
GAP = [PRE, *as_bytes("def f("), SUF, *as_bytes("return x"), MID]
ASK: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(", "suffix": "return x", "max_tokens": 20},
    "/api/generate": {"model": MODEL, "prompt": "def f(", "suffix": "return x", "stream": False},
    "/infill": {"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 20},
}
FIELD = {"/v1/completions": "suffix", "/api/generate": "suffix", "/infill": "input_suffix"}


@pytest.fixture(scope="module")
def coder() -> Iterator[RunningServer]:
    with running(tokenizer=TOKENIZER) as server:
        yield server


@pytest.fixture
def client(coder: RunningServer) -> Iterator[httpx.Client]:
    coder.reset()
    coder.engine.script = lambda ids: as_bytes("x): ")
    with httpx.Client(base_url=coder.url, timeout=HANG_S) as client:
        yield client


def prompt(server: RunningServer) -> list[int]:
    """What the engine was asked to continue last."""
    return list(np.frombuffer(server.engine.seen[-1].input_ids, dtype=np.int32).tolist())


def events(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    lines = client.post(path, json={**ASK[path], **fields, "stream": True}).text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]


def said(answer: dict[str, Any]) -> str:
    return str(
        answer["choices"][0]["text"]
        if "choices" in answer
        else answer.get("content", answer.get("response"))
    )


@pytest.mark.parametrize("path", ASK)
def test_the_gap_is_reported_in_the_models_own_tokens_and_filled(
    client: httpx.Client, coder: RunningServer, path: str
) -> None:
    assert said(client.post(path, json=ASK[path]).json()) == "x): "
    assert prompt(coder) == GAP
    assert "".join(map(said, events(client, path))) == "x): "


@pytest.mark.parametrize("path", ASK)
def test_the_models_own_marks_end_what_fills_the_gap(
    client: httpx.Client, coder: RunningServer, path: str
) -> None:
    coder.engine.script = lambda ids: [*as_bytes("x"), PAD, *as_bytes("y")]
    assert said(client.post(path, json=ASK[path]).json()) == "x"
    assert {PRE, SUF, MID, FILE, PAD} <= set(coder.engine.seen[-1].sampling.stop_token_ids)


@pytest.mark.parametrize("path", ASK)
def test_a_model_without_such_tokens_refuses_by_the_name_of_the_field(
    http: httpx.Client, path: str
) -> None:
    answer = http.post(path, json=ASK[path])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"{FIELD[path]}: this model cannot fill in the middle" in (
        error if isinstance(error, str) else error["message"]
    )


def test_an_echo_has_the_prompt_and_not_the_suffix(client: httpx.Client) -> None:
    body = {**ASK["/v1/completions"], "echo": True}
    assert said(client.post("/v1/completions", json=body).json()) == "def f(x): "


def test_stop_strings_hold_in_the_gap(client: httpx.Client) -> None:
    answer = client.post("/infill", json={**ASK["/infill"], "stop": [")"]}).json()
    assert answer["content"] == "x"
    assert answer["stop_type"] == "word"
    assert answer["stopping_word"] == ")"


def test_prompts_of_a_list_and_of_ids_share_the_suffix(
    client: httpx.Client, coder: RunningServer
) -> None:
    body = {**ASK["/v1/completions"], "prompt": [as_bytes("def f("), as_bytes("a")]}
    assert len(client.post("/v1/completions", json=body).json()["choices"]) == 2
    prompts = [np.frombuffer(one.input_ids, dtype=np.int32).tolist() for one in coder.engine.seen]
    assert prompts == [GAP, [PRE, *as_bytes("a"), SUF, *as_bytes("return x"), MID]]


def test_other_files_stand_before_and_the_beginning_of_the_gap_behind(
    client: httpx.Client, coder: RunningServer
) -> None:
    files = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
    body = {**ASK["/infill"], "input_extra": files, "prompt": "x"}
    assert client.post("/infill", json=body).status_code == 200
    names = [
        FILE,
        *as_bytes("a.py\nA"),
        FILE,
        *as_bytes("filename\nB"),
        FILE,
        *as_bytes("filename\n"),
    ]
    assert prompt(coder) == [*names, *GAP, *as_bytes("x")]


def test_the_last_event_has_the_numbers(client: httpx.Client) -> None:
    *pieces, last = events(client, "/infill", n_predict=2)
    assert all(
        set(piece) == {"index", "content", "tokens", "stop"} and not piece["stop"]
        for piece in pieces
    )
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "limit", 2)
    assert last["tokens_evaluated"] == len(GAP)
    assert last["timings"]["prompt_n"] == len(GAP) - last["tokens_cached"]


def test_nothing_need_be_generated(client: httpx.Client) -> None:
    """Editors send this so that the prompt is in the cache."""
    answer = client.post("/infill", json={**ASK["/infill"], "n_predict": 0}).json()
    assert answer["content"] == ""
    assert answer["tokens_predicted"] == 0


@pytest.mark.parametrize(
    "fields",
    [{"truncate_prompt_tokens": 5}, {"echo": True, "logprobs": 1}, {"prompt": "x" * 2_000}],
)
def test_fields_that_exclude_a_suffix_are_refused(
    client: httpx.Client, fields: dict[str, Any]
) -> None:
    assert (
        client.post("/v1/completions", json={**ASK["/v1/completions"], **fields}).status_code == 400
    )


def test_a_chat_has_no_suffix(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "suffix": "y"}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "suffix is not supported" in answer.json()["error"]["message"]


def test_an_empty_suffix_is_none(client: httpx.Client, coder: RunningServer) -> None:
    client.post("/v1/completions", json={**ASK["/v1/completions"], "suffix": ""})
    assert prompt(coder) == as_bytes("def f(")
