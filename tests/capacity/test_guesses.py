"""How often guesses are right: learnt from texts, and drawn for simulated ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.capacity.machines import ids
from weft.capacity.guesses import (
    DRAWN_LEN,
    NUM_DRAWN,
    NUM_STATES,
    USUAL,
    GuessModel,
    Text,
    drawn_outcomes,
    learn_guesses,
    outcomes,
    outcomes_for,
)
from weft.scheduler.speculation.sources import Known, Repetition
from weft.sim.guesses import LONG_RIGHT, LONG_WRONG, NO_GUESS, RIGHT, SHORT_RIGHT, SHORT_WRONG

SIZES = range(4, 1, -1)
SHARES: Any = SimpleNamespace(message=SimpleNamespace(shares_kv=True))


def model_of(*texts: Text) -> GuessModel:
    return learn_guesses(texts, longest=4, shortest=2)


def share(found: np.ndarray, first: int, last: int) -> float:
    """Of right guesses among the tokens from `first` to `last`."""
    return float(np.isin(found[:, first:last], RIGHT).mean())


def test_a_text_says_which_guesses_would_have_been_right() -> None:
    text = Text(ids(7, 8, 9), ids(7, 8, 9, 5, 7, 8, 9, 5, 7, 2))
    assert outcomes(text, SIZES) == [
        *(NO_GUESS, NO_GUESS, SHORT_RIGHT, LONG_WRONG, NO_GUESS),
        *(NO_GUESS, SHORT_RIGHT, LONG_RIGHT, LONG_RIGHT, LONG_WRONG),
    ]
    assert outcomes(Text(b"", ids(1, 2, 3, 1, 2, 4)), SIZES)[-1] == SHORT_WRONG


def test_outcomes_are_those_of_the_sources_of_the_server() -> None:
    rng = np.random.default_rng(3)
    long = Repetition(0.6, 4, 3)
    short = Repetition(0.3, 2, 2)
    for _ in range(20):
        tokens = rng.integers(0, 4, 60)
        text = Text(ids(*tokens[:20]), ids(*tokens[20:]))
        for at, outcome in enumerate(outcomes(text, SIZES), 20):
            known = Known(SHARES, ids(*tokens[:at]))
            of_long = long.drafts(known, 1)
            guess = of_long or short.drafts(known, 1)
            is_right = guess == ids(tokens[at])
            assert (outcome in RIGHT) == is_right
            assert (outcome == NO_GUESS) == (not guess)
            assert (outcome in (LONG_RIGHT, LONG_WRONG)) == bool(of_long)


def test_long_texts_are_drawn_from_short_ones_that_were_measured() -> None:
    rng = np.random.default_rng(0)
    chances = model_of().chances
    truth = GuessModel(counts=tuple(tuple(row) for row in (1e6 * chances).astype(int).tolist()))
    drawn = drawn_outcomes(truth)
    counts = np.zeros((NUM_STATES, 5), dtype=int)
    for row, chance in zip(counts, chances, strict=True):
        row += rng.multinomial(4_000, chance)
    learnt = drawn_outcomes(GuessModel(counts=tuple(tuple(row) for row in counts.tolist())))
    assert share(drawn, 0, 16) < 0.05
    assert share(drawn, 200, 400) > 0.2
    assert share(learnt, 200, 400) == pytest.approx(share(drawn, 200, 400), rel=0.25)


def test_with_nothing_measured_guesses_are_as_usual() -> None:
    usual = np.array(USUAL)
    assert usual.shape == (NUM_STATES, 5)
    chances = model_of().chances
    np.testing.assert_allclose(chances, usual / usual.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)


def test_a_text_without_repetition_makes_guesses_rarer_and_one_of_it_more_frequent() -> None:
    plain = model_of(*[Text(b"", ids(*range(500)))] * 20)
    loop = model_of(*[Text(b"", ids(*[1, 2, 3] * 100))] * 20)
    usual = share(drawn_outcomes(model_of()), 0, 200)
    assert share(drawn_outcomes(plain), 0, 200) < usual / 2
    assert share(drawn_outcomes(loop), 0, 200) > 2 * usual


def test_drawn_texts_differ_from_each_other_as_measured_ones_do() -> None:
    """Chances alone would let each text begin to repeat itself after a while."""
    plain = Text(b"", ids(*range(100)))
    loop = Text(b"", ids(*[1, 2, 3] * 40))
    model = model_of(*[plain, loop] * 20)
    of_each = np.isin(drawn_outcomes(model)[:, 5:100], RIGHT).mean(axis=1)
    assert (of_each == 0).mean() == pytest.approx(0.5, abs=0.05)
    assert (of_each == 1).mean() == pytest.approx(0.5, abs=0.05)


def test_a_text_goes_on_after_its_measured_part_as_those_that_were_as_far() -> None:
    loops = [Text(b"", ids(*[1, 2, 3] * 10))] * 20
    long = Text(b"", ids(*[1, 2, 3] * 100))
    drawn = drawn_outcomes(model_of(*loops, long))
    assert share(drawn, 10, 300) > 0.95


def test_few_requests_have_as_many_right_guesses_as_many_have() -> None:
    model = model_of()
    all_of_them = share(drawn_outcomes(model), 0, 100)
    some = [np.frombuffer(outcomes_for(model, n % 10, n // 10, 100), np.uint8) for n in range(40)]
    assert share(np.array(some), 0, 100) == pytest.approx(all_of_them, rel=0.1)


def test_a_text_longer_than_those_that_are_drawn_goes_on_as_they_do() -> None:
    model = model_of()
    found = outcomes_for(model, 3, 1, 3 * DRAWN_LEN)
    assert len(found) == 3 * DRAWN_LEN
    assert found[:DRAWN_LEN] in {row.tobytes() for row in drawn_outcomes(model)}
    assert found[DRAWN_LEN : DRAWN_LEN + DRAWN_LEN // 2] == found[DRAWN_LEN // 2 : DRAWN_LEN]
    assert len(drawn_outcomes(model)) == NUM_DRAWN
