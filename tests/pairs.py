"""Chooses among the tests of one function, whose parameters are all combined, so few that each two
values are tried together: what `pytest.mark.pairs` asks for. `scripts/test --all` tries all.

    kernels × formats × sizes:  7 × 24 × 4 = 672 tests, of which 168 have each pair
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest


def with_all_pairs(rows: Sequence[Sequence[str]]) -> list[int]:
    """Places of the rows to take, so that any two values that stand together in a row do so in one
    of them. `rows`: a value for each parameter."""
    num_columns = len(rows[0])
    pairs = list(combinations(range(num_columns), 2))
    found = [{(one, row[one], other, row[other]) for one, other in pairs} for row in rows]
    taken: set[int] = set()
    seen: set[tuple[int, str, int, str]] = set()
    # First the rows with the most pairs that are new.
    for least, place in product(range(len(pairs), 0, -1), range(len(rows))):
        if len(found[place] - seen) >= least:
            taken.add(place)
            seen |= found[place]
    return sorted(taken)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Tests that have the mark, and no two values together that no other test has."""
    functions: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for tests in functions.values():
        if not all(hasattr(test, "callspec") for test in tests):
            continue
        rows = [test.callspec._idlist for test in tests]
        if len(rows[0]) > 2:
            left.update(tests)
            left.difference_update(tests[place] for place in with_all_pairs(rows))
    return left
