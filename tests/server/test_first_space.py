"""Answers of a model whose tokenizer has spaces at the beginning of words, as Llama 2 and Mistral
have."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from tests.text.tokens import sentencepiece_backend
from weft.text.tokenizer import Tokenizer

# 256 is <s>, 257 the end of sequence of the fake engine
TOKENIZER = Tokenizer(
    sentencepiece_backend(["</s>", "▁", "▁Hello", "▁wor", "ld", "!"]), {}, {"default": "[INST]"}
)
SPACE = 258
HELLO = 259
WOR = 260
LD = 261
MIDDLE = list("中".encode())
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def spaced_server() -> Iterator[RunningServer]:
    with running(tokenizer=TOKENIZER) as server:
        yield server


@pytest.fixture
def spaced(spaced_server: RunningServer) -> Iterator[httpx.Client]:
    spaced_server.engine.script = lambda ids: [WOR, LD, *MIDDLE, SPACE, WOR]
    with httpx.Client(base_url=spaced_server.url, timeout=HANG_S) as client:
        yield client


def text_of(client: httpx.Client, **fields: object) -> str:
    """The text of a completion, asked for whole and in pieces: it is the same."""
    body = {"prompt": [256, HELLO], "max_tokens": 20, **fields}
    whole = client.post(TEXT, json=body).json()["choices"][0]["text"]
    events = client.post(TEXT, json={**body, "stream": True}).text.split("data: ")
    pieces = [json.loads(event)["choices"][0]["text"] for event in events if event.startswith("{")]
    assert "".join(pieces) == whole
    return str(whole)


def test_the_first_word_keeps_its_space_and_an_echo_is_the_text_of_all_ids(
    spaced: httpx.Client,
) -> None:
    assert text_of(spaced) == " world中  wor"
    assert text_of(spaced, echo=True) == "Hello world中  wor"


def test_a_completion_ends_the_character_that_its_prompt_has_begun(
    spaced: httpx.Client, spaced_server: RunningServer
) -> None:
    spaced_server.engine.script = lambda ids: [MIDDLE[2], WOR]
    assert text_of(spaced, prompt=[256, HELLO, *MIDDLE[:2]], echo=True) == "Hello中 wor"


def test_stop_strings_see_the_first_space(spaced: httpx.Client) -> None:
    assert text_of(spaced, stop=[" world"]) == ""
    assert text_of(spaced, stop=["Hello"]) == " world中  wor"  # what the prompt says ends nothing


def test_places_of_tokens_are_places_in_the_text(spaced: httpx.Client) -> None:
    body = {"prompt": [256, HELLO], "max_tokens": 20, "echo": True, "logprobs": 0}
    choice = spaced.post(TEXT, json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"][1:4] == [" Hello", " wor", "ld"]
    assert found["text_offset"][1:9] == [0, 5, 9, 11, 11, 11, 12, 13]
    assert choice["text"][5:9] == " wor"


def test_every_api_tells_the_first_space(spaced: httpx.Client) -> None:
    native = spaced.post(
        "/generate", json={"input_ids": [256, HELLO], "sampling_params": {"max_new_tokens": 20}}
    )
    assert native.json()["text"] == " world中  wor"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    answer = spaced.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == " world中  wor"


def test_detokenizing_ids_still_begins_a_text(spaced: httpx.Client) -> None:
    assert spaced.post("/detokenize", json={"tokens": [WOR, LD]}).json()["text"] == "world"
