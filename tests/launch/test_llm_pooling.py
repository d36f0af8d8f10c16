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
    with pytest.raises(InvalidParam, match="102 tokens"):
        llm.embed(["a", "b " * 100])
    assert len(llm.embed("b " * 100, truncate=True)) == 1
    with pytest.raises(InvalidParam, match=r"inputs\[0\]: dimensions is 49"):
        llm.embed(["a", "b"], dimensions=49)
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
