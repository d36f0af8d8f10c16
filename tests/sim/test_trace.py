from __future__ import annotations

import numpy as np
import pytest

from weft.sim.trace import EOS, FILLER, FIRST_TOKEN, OUTPUT, Segment, TokenSource

VOCAB_SIZE = 1_000


@pytest.fixture
def source() -> TokenSource:
    return TokenSource(VOCAB_SIZE)


def ids(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, dtype=np.int32).tolist()
    return tokens


@pytest.mark.parametrize("length", [1, 2, 3, 100, TokenSource.TABLE_LEN + 5])
def test_prompt_has_as_many_tokens_as_its_segments(source: TokenSource, length: int) -> None:
    tokens = ids(source.pack((Segment(5, length), Segment(6, 7))))
    assert len(tokens) == length + 7
    assert min(tokens) >= FIRST_TOKEN
    assert max(tokens) < VOCAB_SIZE


def test_segments_of_one_key_begin_alike(source: TokenSource) -> None:
    short = source.pack((Segment(12_345, 100),))
    long = source.pack((Segment(12_345, 300),))
    assert long.startswith(short)


def test_segments_of_different_keys_differ_in_their_first_two_tokens(source: TokenSource) -> None:
    heads = {source.pack((Segment(key, 2),)) for key in range(20_000)}
    assert len(heads) == 20_000


def test_output_segment_is_what_the_cost_runner_samples(source: TokenSource) -> None:
    assert ids(source.pack((Segment(OUTPUT, 4),))) == [FILLER, FILLER, FILLER, EOS]
