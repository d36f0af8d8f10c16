"""What a client is told of its wait has the front's part on top."""

from __future__ import annotations

import random

import pytest

from weft.client.front_delay import MAX_DELAYS, REFRESH, FrontDelay


def test_before_anything_is_learnt_the_engines_word_stands() -> None:
    delay = FrontDelay()
    for _ in range(REFRESH - 1):
        delay.learn(9.0)
    assert delay.added_to("12-34") == "12-34"


def test_bounds_move_by_what_one_in_twenty_took_less_and_one_in_twenty_more() -> None:
    delay = FrontDelay()
    seconds = [0.010 + 0.001 * number for number in range(21)]
    random.Random(0).shuffle(seconds)
    for one in seconds * 16:
        delay.learn(one)
    low, high = map(int, delay.added_to("100-200").split("-"))
    assert low == pytest.approx(111, abs=1)
    assert high == pytest.approx(229, abs=1)


def test_a_band_is_never_narrowed_by_rounding() -> None:
    delay = FrontDelay()
    for _ in range(REFRESH):
        delay.learn(0.0015)
    assert delay.added_to("3-4") == "4-6"


def test_what_was_long_ago_counts_no_more() -> None:
    delay = FrontDelay()
    for _ in range(MAX_DELAYS):
        delay.learn(5.0)
    for _ in range(MAX_DELAYS):
        delay.learn(0.001)
    assert delay.added_to("3-4") == "4-5"
