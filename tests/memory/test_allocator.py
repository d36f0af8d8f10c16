from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.memory.accounting.audit import AccountingError, audit
from weft.memory.allocator import OutOfPages, PageAllocator, RowTable, num_pages_for, slots_of
from weft.memory.radix.cache import RadixCache


def test_slots_of_pages_are_in_order() -> None:
    assert slots_of(np.array([2, 0], dtype=np.int32), 3).tolist() == [6, 7, 8, 0, 1, 2]
    assert slots_of(np.array([2, 0], dtype=np.int32), 1).tolist() == [2, 0]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for_tokens_are_rounded_up(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens, 4) == pages


def test_asking_for_too_much_takes_nothing() -> None:
    allocator = PageAllocator(num_pages=3, page_size=2)
    allocator.alloc(2)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 3"):
        allocator.alloc(2)
    assert allocator.num_free == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-6, 6), max_size=60))
def test_every_page_is_held_or_free(moves: list[int]) -> None:
    allocator = PageAllocator(num_pages=11, page_size=1)
    held: list[int] = []
    for move in moves:
        if 0 < move <= allocator.num_free:
            held += allocator.alloc(move).tolist()
        elif move < 0:
            back, held = held[:-move], held[-move:]
            allocator.free(np.array(back, dtype=np.int32))
        assert sorted(held + allocator.free_pages().tolist()) == list(range(11))


def test_the_audit_names_the_owners_of_a_page_owned_twice() -> None:
    allocator = PageAllocator(num_pages=4, page_size=1)
    taken = allocator.alloc(2)
    with pytest.raises(AccountingError, match=r"page 0 is owned by a and b"):
        audit(
            allocator, RadixCache(1, shares=False), {"a": taken, "b": np.array([0], dtype=np.int32)}
        )
    with pytest.raises(AccountingError, match=r"page 0 is owned by nobody"):
        audit(allocator, RadixCache(1, shares=False), {"a": taken[taken != 0]})
    audit(allocator, RadixCache(1, shares=False), {"a": taken})


def test_the_runner_is_told_of_what_a_row_points_to() -> None:
    rows = RowTable(num_rows=2, max_len=9, page_size=2)
    row = rows.alloc()
    rows.point(row, 2, np.array([5, 7], dtype=np.int32))
    assert rows.pages_of(row, 2, 5).tolist() == [5, 7]
    assert rows.slots_of(row, 3, 6).tolist() == [11, 14, 15]
    ((written, start, slots),) = rows.take_writes()
    assert (written, start, slots.tolist()) == (row, 2, [10, 11, 14, 15])
    assert rows.take_writes() == []
    rows.free(row)
    assert rows.num_free == 2
