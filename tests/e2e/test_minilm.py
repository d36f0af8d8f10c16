"""A real encoder, all-MiniLM-L6-v2, gives the vectors of transformers over HTTP: where its package
is installed (scripts/test fetches it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.server import Server
from weft.weights.known import MINILM

FOLDER = MINILM.found()
pytestmark = pytest.mark.skipif(FOLDER is None, reason=f"{MINILM.name}: {MINILM.install}")
TOLERANCE = 1e-6  # of numbers in vectors of length 1
MAX_LEN = 256
WORDS = (
    *("the", "a", "cat", "runs", "under", "bridges", "of", "Paris", "42", "don't"),
    *("naïve", "Überraschung", "你好", "🙂", "İstanbul", "x\u0301", "..."),
)
ODD = [" ", "Hello, World!", "\x00\u200b x", "ab" * 150, "A" * 20]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server(MINILM.name, small=("--threads", "1"))
    yield started
    assert started.stop() == 0


class Reference:
    """The mean of the last states, to length 1: as its modules.json says."""

    def __init__(self) -> None:
        assert FOLDER is not None
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
        self._model = transformers.AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval()

    def num_tokens(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])

    def vector(self, text: str) -> np.ndarray:
        inputs = self._tokenizer(text, truncation=True, max_length=MAX_LEN, return_tensors="pt")
        with torch.inference_mode():
            states = self._model(**inputs).last_hidden_state[0]
        return np.asarray(torch.nn.functional.normalize(states.mean(0), dim=0))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def texts(*lens: int) -> list[str]:
    """Texts of so many words."""
    generator = np.random.default_rng(1)
    return [" ".join(generator.choice(WORDS, length)) for length in lens]


def vectors(server: Server, **body: Any) -> np.ndarray:
    answer = server.post("/v1/embeddings", **body)
    return np.array([one["embedding"] for one in answer["data"]])


def test_vectors_of_many_lengths_are_those_of_transformers(
    server: Server, reference: Reference
) -> None:
    inputs = texts(1, 2, 3, 5, 8, 13, 21, 34, 55, 80, 100) + ODD
    found = vectors(server, input=inputs)
    expected = np.stack([reference.vector(text) for text in inputs])
    assert np.abs(found - expected).max() < TOLERANCE
    one_by_one = np.concatenate([vectors(server, input=text) for text in inputs[:4]])
    assert np.array_equal(one_by_one, found[:4])


def test_a_text_that_is_too_long_is_cut_where_it_was_in_training(
    server: Server, reference: Reference
) -> None:
    long = texts(200, 300)
    assert reference.num_tokens(long[0]) > MAX_LEN
    with pytest.raises(HTTPError) as refused:
        vectors(server, input=long)
    refused.value.close()
    assert refused.value.code == 400
    found = vectors(server, input=[*long, "a cat"], truncate_prompt_tokens=-1)
    expected = np.stack([reference.vector(text) for text in (*long, "a cat")])
    assert np.abs(found - expected).max() < TOLERANCE


def test_what_is_alike_is_near(server: Server) -> None:
    documents = ["The stock market fell.", "A kitten is asleep.", "Bridges are made of steel."]
    ranked = server.post("/v1/rerank", query="a cat sleeps", documents=documents)["results"]
    assert ranked[0]["index"] == 1
    scores = server.post("/v1/score", text_1="a cat sleeps", text_2=documents)["data"]
    found = vectors(server, input=["a cat sleeps", *documents])
    cosines = found[1:] @ found[0]
    assert np.allclose([one["score"] for one in scores], cosines, atol=1e-6)
    assert cosines.argmax() == 1
    assert cosines[1] > 0.5 > cosines[0]
