"""`weft.LLM` with models that make vectors and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.pooled import make_pooled
from weft import LLM, SamplingParams
from weft.config.options import SettingsError
from weft.messages.sampling import InvalidParam


def test_vectors_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    reference = make_pooled("bert-mean", tmp_path)
    llm = LLM(str(tmp_path), device="cpu", threads=1, max_queued_requests=66)
    assert llm._window < 5, "several messages are needed"
    texts = ["one", "two words", "x", "a b c d e", "last"]
    for text, vector in zip(texts, llm.embed(texts), strict=True):
        ids = llm.tokenizer.encode(text)
        assert np.abs(vector - reference.vector(ids, [0] * len(ids))).max() < 2e-5
    assert len(llm.embed("one", dimensions=8)[0]) == 8
    with pytest.raises(InvalidParam, match=r"^inputs\[1\]: the prompt has 102 tokens"):
        llm.embed(["a", "b " * 100])
    assert len(llm.embed("b " * 100, truncate=True)) == 1
    with pytest.raises(InvalidParam, match=r"inputs\[0\]: dimensions is 49"):
        llm.embed(["a", "b"], dimensions=49)
    for given, words in [
        ({"inputs": 3}, "inputs is 3; a text, token ids"),
        ({"inputs": ["a", None]}, r"inputs\[1\] is None; a text, token ids"),
        ({"inputs": [()]}, "^the prompt is empty"),
        ({"inputs": ["a", "\ud800"]}, r"^inputs\[1\]: the text is not valid Unicode"),
        ({"inputs": ["a", ("a", 2)]}, r"^inputs\[1\]: prompt is 'a'; a whole number is needed"),
        ({"inputs": "a", "truncate": 64}, "truncate is 64; True or False is expected"),
        ({"inputs": "a", "dimensions": "8"}, "dimensions is '8'; a whole number is needed"),
        ({"inputs": "a", "dimensions": -1}, "dimensions is -1; 1 or more are allowed"),
        ({"inputs": "a", "dimensions": None}, "dimensions is None; a whole number is needed"),
    ]:
        with pytest.raises(InvalidParam, match=words):
            llm.embed(**given)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="used to embed"):
        llm.classify("a")
    with pytest.raises(InvalidParam, match="generates no tokens"):
        llm.generate("a", SamplingParams(max_new_tokens=1))


def test_a_cross_encoder_scores_documents(tmp_path: Path) -> None:
    reference = make_pooled("bert-pair", tmp_path)
    llm = LLM(str(tmp_path), device="cpu", threads=1)
    ids, types = llm.tokenizer.encode_input(("a query", "a document"))
    expected = float(reference.vector(ids, types)[0])
    assert llm.score("a query", ["other", "a document"])[1] == pytest.approx(expected, abs=2e-5)
    assert llm.classify("a")[0].keys() == {"LABEL_0"}
    for query, documents, words in [
        (3, ["x"], "query is 3; a text is expected"),
        ("q", "x", "documents is 'x'; a list of texts is expected"),
        ("q", ["x", 3], r"documents\[1\] is 3; a text is expected"),
    ]:
        with pytest.raises(InvalidParam, match=words):
            llm.score(query, documents)  # type: ignore[arg-type]
