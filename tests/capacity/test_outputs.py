"""Outputs of simulated requests from those that were measured."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tests.capacity.test_workload import ids
from weft.capacity.outputs import MeasuredOutputs


def drawn(pool: MeasuredOutputs, user: int, number: int, length: int) -> list[int]:
    return np.frombuffer(pool.draw(user, number, length), dtype=np.int32).tolist()


def pattern(tokens: list[int]) -> list[int]:
    """For each token, where it came first: what is left of an output under other names."""
    return [tokens.index(token) for token in tokens]


def test_an_output_is_the_beginning_of_a_measured_one_that_is_at_least_as_long() -> None:
    short = [5, 6, 5, 6]
    long = [7, 8, 9, 7, 8, 9, 9, 9]
    pool = MeasuredOutputs([ids(*long), ids(*short), ids(*long), ids(*long), ids(*long)], 100)
    found = {tuple(pattern(drawn(pool, user, 0, 6))) for user in range(9)}
    assert found == {tuple(pattern(long[:6]))}
    found = {tuple(pattern(drawn(pool, user, 0, 4))) for user in range(9)}
    assert found == {tuple(pattern(long[:4])), tuple(pattern(short))}


def test_all_measured_outputs_are_used_about_equally_often() -> None:
    pool = MeasuredOutputs([ids(*[2] * n, *[3] * (10 - n)) for n in range(10)], 100)
    used = Counter(
        pattern(drawn(pool, user, number, 10)).count(0) for user in range(50) for number in range(4)
    )
    assert len(used) == 10
    assert max(used.values()) <= 2 * 200 / 10


def test_an_output_longer_than_all_goes_on_as_their_later_halves() -> None:
    pool = MeasuredOutputs([ids(2, 3, 4, 5, 9, 9, 9, 9)], 100)
    output = drawn(pool, 3, 1, 15)
    assert len(output) == 15
    assert len(set(output[4:])) == 1


def test_answers_of_one_chat_do_not_repeat_each_other() -> None:
    pool = MeasuredOutputs([ids(*range(2, 30))], 10_000)
    outputs = [drawn(pool, 0, number, 28) for number in range(4)]
    pairs = {pair for output in outputs for pair in pairwise(output)}
    assert len(pairs) == 4 * 27
    assert drawn(pool, 0, 2, 28) == outputs[2]


def test_tokens_stay_in_the_vocabulary() -> None:
    pool = MeasuredOutputs([ids(0, 1, 2, 500, 999)], 20)
    for user in range(30):
        assert all(2 <= token < 20 for token in drawn(pool, user, 0, 5))
    with pytest.raises(AssertionError, match="no outputs"):
        MeasuredOutputs([b""], 20)
