"""Words of transcripts and their times, compared with transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper import generation_whisper, tokenization_whisper

from weft.text.speech.words import _first_vectors, token_times, words_of

# Each token is a text, or bytes that are no character by themselves.
TOKENS = [
    *(text.encode() for text in (" he", "llo", " wor", "ld", "don", "'t", " I", "你", "好", " é")),
    *(text.encode() for text in (",", ".", "...", "?", "!", " (", "(", ")", '"', ' "', " [", "]")),
    *(
        text.encode()
        for text in (" ", "  ", "-", " -", "¿", " ¿", "。", "、", "'.", "?:", " '", "\n")
    ),
    "好".encode()[:1],
    "好".encode()[1:],
    "é".encode()[:1],
    "é".encode()[1:],
    b"\xff",
]


def decode(ids: Sequence[int]) -> str:
    return b"".join(TOKENS[id] for id in ids).decode("utf-8", "replace")


class Spelling:
    """What transformers asks of a tokenizer."""

    eos_token_id = len(TOKENS)
    language = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return decode(ids)


@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("zh", "chinese")])
def test_words_are_those_of_transformers(code: str, name: str) -> None:
    draw = random.Random(3)
    num_compared = 0
    for _ in range(2_000):
        ids = [draw.randrange(len(TOKENS)) for _ in range(draw.randrange(1, 14))]
        spans = [(0.02 * place, 0.02 * place + 0.02) for place in range(len(ids))]
        texts, _tokens, indices = tokenization_whisper._combine_tokens_into_words(
            Spelling(), ids, name
        )
        found = words_of(ids, spans, code, decode)
        assert sum(len(word.ids) for word in found) == len(ids)
        if sum(map(len, indices)) < len(ids):
            continue  # it loses bytes at the end that are no characters
        num_compared += 1
        assert [word.text for word in found] == texts, ids
        assert [word.ids for word in found] == [tuple(ids[i] for i in own) for own in indices]
        for word, own in zip(found, indices, strict=True):
            assert (word.start_s, word.end_s) == (spans[own[0]][0], spans[own[-1]][1])
    assert num_compared > 1_500


def test_the_path_is_that_of_transformers() -> None:
    draw = np.random.default_rng(5)
    for num_tokens, num_vectors in ((1, 1), (1, 9), (7, 3), (12, 80), (40, 120)):
        costs = draw.standard_normal((num_tokens, num_vectors))
        # Ties, too.
        for own in (costs, np.round(costs)):
            tokens, vectors = generation_whisper._dynamic_time_warping(own)
            begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
            assert _first_vectors(own) == vectors[begins].tolist()


class Outputs(SimpleNamespace):
    """What transformers generated."""

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


def test_the_times_of_tokens_are_those_of_transformers() -> None:
    model = SimpleNamespace(config=SimpleNamespace(decoder_layers=1, median_filter_width=7))
    for seed, (num_tokens, num_vectors) in enumerate([(2, 5), (9, 60), (30, 200)]):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(1, 3, num_tokens, num_vectors, generator=generator).softmax(-1)
        outputs = Outputs(cross_attentions=[[weights]], sequences=torch.zeros(1, num_tokens))
        wanted = generation_whisper.WhisperGenerationMixin._extract_token_timestamps(
            model, outputs, [[0, head] for head in range(3)], 0.02, 2 * num_vectors, 0
        )
        found = token_times(weights[0].transpose(0, 1).numpy())
        assert found == pytest.approx(wanted[0, :-1].tolist())
