"""Paths that are kept for who comes back, until memory is needed."""

from __future__ import annotations

import numpy as np

from weft.memory.pins import Holds, Lost
from weft.memory.prefix_cache import NoPrefixCache
from weft.memory.radix import RadixCache


def pack(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def make_tree() -> tuple[RadixCache, Holds]:
    """Three paths of two pages; the first page is common to all."""
    tree = RadixCache(page_size=1)
    for n in range(3):
        tree.insert("", pack(1, 10 + n), pages(0, n + 1))
    return tree, Holds(tree)


def test_what_is_held_counts_apart_and_is_not_evicted() -> None:
    tree, holds = make_tree()
    hold = holds.keep("a", "", pack(1, 10, 99))
    assert hold.num_tokens == 2
    assert (tree.evictable_pages, tree.held_pages) == (2, 2)
    assert sorted(tree.evict(2).tolist()) == [2, 3]
    hold.drop()
    hold.drop()
    assert (tree.evictable_pages, tree.held_pages) == (2, 0)
    assert sorted(tree.evict(2).tolist()) == [0, 1]
    tree.check()


def test_a_lock_goes_before_a_hold_and_gives_back_to_it() -> None:
    tree, holds = make_tree()
    hold = holds.keep("a", "", pack(1, 10))
    tree.lock(hold.handle)
    assert (tree.held_pages, tree.protected_pages) == (0, 2)
    tree.unlock(hold.handle)
    assert (tree.held_pages, tree.protected_pages) == (2, 0)
    tree.lock(hold.handle)
    hold.drop()
    assert (tree.held_pages, tree.protected_pages) == (0, 2)
    tree.unlock(hold.handle)
    assert tree.evictable_pages == 4
    tree.check()


def test_the_least_recently_used_gives_way_first_and_no_more_than_needed() -> None:
    tree, holds = make_tree()
    kept = [holds.keep(name, "", pack(1, 10 + n)) for n, name in enumerate("abc")]
    kept[0].touch()
    holds.give_way(1)
    assert [hold.name for hold in holds] == ["c", "a"]
    assert holds.take_lost() == [Lost("b", 2, "its memory was needed")]
    assert holds.take_lost() == []
    holds.give_way(4)  # the common page stays with the last
    assert list(holds) == []
    assert tree.evictable_pages == 4
    tree.check()


def test_nothing_is_held_where_nothing_is_cached() -> None:
    for holds in (make_tree()[1], Holds(NoPrefixCache(1))):
        hold = holds.keep("a", "", pack(7, 8))
        assert hold.num_tokens == 0
        hold.touch()
        hold.drop()
        holds.lose_all("for nothing")
        assert holds.take_lost() == []
