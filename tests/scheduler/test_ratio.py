"""What running requests are expected to generate, against plain sums over whatever numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.scheduler.admission import NewTokenRatio, expected_tokens
from weft.scheduler.request import Columns

NUM_ROWS = 6
LONGEST = 4_096  # tokens that a request is expected to generate at most


def columns(prompts: list[int], known: list[int], most: list[int], stops: list[bool]) -> Columns:
    made = Columns(NUM_ROWS, 1)
    made.prompt_len[:] = prompts
    made.known_len[:] = [prompt + n for prompt, n in zip(prompts, known, strict=True)]
    made.seq_len[:] = made.known_len + 1
    made.max_len[:] = [prompt + n for prompt, n in zip(prompts, most, strict=True)]
    made.stops_at_eos[:] = stops
    return made


def numbers(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=NUM_ROWS, max_size=NUM_ROWS)


ROWS = st.sets(st.integers(0, NUM_ROWS - 1), min_size=1).map(
    lambda rows: np.array(sorted(rows), dtype=np.int32)
)
STOPS = st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS)


@given(
    numbers(1, 50),
    numbers(0, 9),
    numbers(0, 9_000),
    STOPS,
    ROWS,
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_outputs_that_ignore_the_end_are_estimated_in_full_and_others_in_part(
    prompts: list[int],
    known: list[int],
    most: list[int],
    stops: list[bool],
    rows: np.ndarray,
    ratio: float,
) -> None:
    expected = Fraction(0)
    for row in rows.tolist():
        left = max(0, min(most[row] - known[row] - 1, LONGEST))
        expected += left * (Fraction(ratio) if stops[row] else 1)
    assert expected_tokens(columns(prompts, known, most, stops), rows, ratio) == expected


@given(numbers(1, 50), numbers(0, 300), numbers(300, 2_000), ROWS)
def test_after_a_retraction_the_ratio_is_what_was_used_with_room_for_twenty_steps(
    prompts: list[int], known: list[int], most: list[int], rows: np.ndarray
) -> None:
    ratio = NewTokenRatio(1.0)
    ratio.learn(columns(prompts, known, most, [True] * NUM_ROWS), rows)
    used = sum(known[row] + 20 for row in rows.tolist())
    allowed = sum(most[row] for row in rows.tolist())
    assert ratio.current == min(1.0, used / (allowed + 1))


@pytest.mark.parametrize("conservativeness", [0.0, 0.3, 1.0, 1.4, 3.0])
def test_the_ratio_falls_in_six_hundred_steps_to_a_seventh_and_no_further(
    conservativeness: float,
) -> None:
    ratio = NewTokenRatio(conservativeness)
    first = min(1.0, 0.7 * conservativeness)
    assert ratio.current == pytest.approx(first)
    for step in range(1, 700):
        before = ratio.current
        ratio.decay()
        share = 1 - 0.86 * min(step, 600) / 600
        assert ratio.current == pytest.approx(first * share)
        assert math.isclose(ratio.current, before) if step > 600 else ratio.current <= before
    ratio.reset()
    assert ratio.current == pytest.approx(first)
