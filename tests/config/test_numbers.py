"""Numbers in texts for users."""

from __future__ import annotations

import pytest

from weft.config.numbers import counted, shown


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("token",), "0 tokens"),
        (1, ("token",), "1 token"),
        (2_000, ("output token",), "2,000 output tokens"),
        (1, ("entry", "entries"), "1 entry"),
        (3, ("entry", "entries"), "3 entries"),
    ],
)
def test_a_count_of_one_is_singular(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 50, "'" + "x" * 39 + "..."),
        ([1, 2], "[1, 2]"),
        ({"a": "b\nc"}, r"{'a': 'b\nc'}"),
        (None, "None"),
        ([10**5_000], "a list"),
    ],
)
def test_a_wrong_value_is_shown_in_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_that_python_would_not_write_is_reported_by_its_size() -> None:
    assert shown(2**20_000) == "a number of 20,001 bits"
