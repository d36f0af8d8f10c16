"""The knee is found with few trials, wherever the search begins."""

from __future__ import annotations

import pytest

from weft.capacity.knee import NO_LEVEL, around, find_knee


@pytest.mark.parametrize("first", [0, 3, 17, 39, 100])
@pytest.mark.parametrize("knee", [NO_LEVEL, 0, 1, 16, 17, 18, 38, 39])
def test_the_highest_level_that_is_borne_is_found(knee: int, first: int) -> None:
    tried: list[int] = []

    def bears(index: int) -> bool:
        tried.append(index)
        return index <= knee

    assert find_knee(bears, 40, first) == knee
    assert len(tried) == len(set(tried)) <= 12


def test_a_good_guess_needs_two_trials() -> None:
    tried: list[int] = []

    def bears(index: int) -> bool:
        tried.append(index)
        return index <= 20

    assert find_knee(bears, 1_000, 20) == 20
    assert sorted(tried) == [20, 21]


def test_a_curve_has_the_knee_and_levels_on_both_sides() -> None:
    levels = [float(level) for level in range(1, 31)]
    shown = around(levels, 20)
    assert {0, 20, 21} <= set(shown)
    assert shown == sorted(shown)
    assert around(levels, 29)[-1] == 29
    assert around(levels, NO_LEVEL)[0] == 0
