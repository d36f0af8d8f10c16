"""A usual run has each pair of values of a test's parameters (`pairs.py`)."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import left_out, with_all_pairs


@pytest.mark.parametrize("sizes", [(7, 24, 4), (2, 2, 2), (7, 3, 4, 4), (5, 1, 3), (1, 1, 1)])
def test_each_two_values_are_tried_together(sizes: tuple[int, ...]) -> None:
    rows = [tuple(map(str, row)) for row in product(*map(range, sizes))]
    taken = [rows[place] for place in with_all_pairs(rows)]
    for one, other in combinations(range(len(sizes)), 2):
        expected = set(product(map(str, range(sizes[one])), map(str, range(sizes[other]))))
        assert {(row[one], row[other]) for row in taken} == expected
    least = max(one * other for one, other in combinations(sizes, 2))
    assert least <= len(taken) <= 1.5 * least
    assert len(set(taken)) == len(taken)


@pytest.mark.pairs
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("third", range(3))
def test_what_has_the_mark_is_left_out_unless_all_are_asked_for(
    request: pytest.FixtureRequest, first: int, second: int, third: int
) -> None:
    own = [item for item in request.session.items if item.name.startswith("test_what_has_the_mark")]
    assert request.config.option.all or not left_out(own)
