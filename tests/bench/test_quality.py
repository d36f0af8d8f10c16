"""What fewer bits cost, by `weft bench quality`: on weft-nano, and its sums by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from weft.arrays import IntArray
from weft.bench.quality import Reader, compare, library_texts, other_config, read_texts
from weft.cli.bench import bench
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError

NANO = EngineConfig(model="weft-nano", threads=1, kv_tokens=1024)
SMALL = ["weft-nano", "--texts", "2", "--text-len", "40", "--threads", "1", "--kv-tokens", "1024"]


def test_int8_is_nearer_to_float32_than_int4(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = {}
    for name in ("int8", "int4"):
        path = tmp_path / f"{name}.json"
        assert bench(["quality", *SMALL, "--quantize", name, "--json", str(path)]) == 0
        figures[name] = json.loads(path.read_text())["results"]
    assert "against weft-nano in float32: 80 tokens" in capsys.readouterr().out
    assert 0 < figures["int8"]["divergence"] < 0.01
    assert figures["int8"]["divergence"] < figures["int4"]["divergence"] < 0.2
    assert figures["int8"]["same_token"] > 0.9
    against = figures["int8"]["perplexity_against"]
    assert figures["int4"]["perplexity_against"] == against
    assert figures["int8"]["perplexity"] == pytest.approx(against, rel=0.05)


def test_a_model_is_as_good_as_itself_and_its_figures_are_those_of_its_log_probabilities() -> None:
    config = other_config(NANO, "float32")
    first = Reader(config, 150)
    second = Reader(config, 150)
    texts = read_texts(first.tokenizer, 2, 150)
    quality = compare(first, second, texts)
    losses = [loss_of(first, tokens) for tokens in texts]
    first.close()
    second.close()
    assert quality.perplexity == quality.perplexity_against
    assert quality.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert quality.change == 0
    assert quality.divergence == 0
    assert quality.same_token == 1


def loss_of(reader: Reader, tokens: IntArray) -> float:
    """Nats a token; the chunks of a text are as long as the text, and its rows sum to 1."""
    logprobs = np.concatenate(list(reader.logprobs(tokens)))
    assert logprobs.shape == (len(tokens) - 1, reader.vocab_size)
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1, rtol=1e-4)
    return -float(np.mean(logprobs[np.arange(len(logprobs)), tokens[1:]]))


def test_texts_lie_evenly_over_the_library_and_are_the_same_each_time() -> None:
    reader = Reader(NANO, 16)
    texts = read_texts(reader.tokenizer, 5, 16)
    whole = "\n\n".join(library_texts())
    assert texts.shape == (5, 16)
    assert np.array_equal(texts, read_texts(reader.tokenizer, 5, 16))
    assert whole.startswith(reader.tokenizer.decode(texts[0].tolist())[:20])
    with pytest.raises(SettingsError, match=r"fewer than 100,000,000 texts of 512"):
        read_texts(reader.tokenizer, 100_000_000, 512)
    reader.close()


def test_longer_texts_than_the_model_takes_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--text-len is 100,000,000; weft-nano takes"):
        Reader(NANO, 100_000_000)
