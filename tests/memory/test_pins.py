"""Paths that are kept for who comes back, until memory is needed."""

from __future__ import annotations

import numpy as np

from weft.memory.accounting.pins import LostPin, Pins
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache


def pack(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def make_tree() -> tuple[RadixCache, Pins]:
    """Three paths of two pages; the first page is common to all."""
    tree = RadixCache(page_size=1)
    for n in range(3):
        tree.insert(CacheKey("", pack(1, 10 + n)), pages(0, n + 1))
    return tree, Pins(tree)


def test_what_is_held_counts_apart_and_is_not_evicted() -> None:
    tree, pins = make_tree()
    pin = pins.keep("a", CacheKey("", pack(1, 10, 99)))
    assert pin.num_tokens == 2
    assert (tree.evictable_pages, tree.pinned_pages) == (2, 2)
    assert sorted(tree.evict(2).tolist()) == [2, 3]
    pin.drop()
    pin.drop()
    assert (tree.evictable_pages, tree.pinned_pages) == (2, 0)
    assert sorted(tree.evict(2).tolist()) == [0, 1]
    tree.check()


def test_a_lock_goes_before_a_pin_and_gives_back_to_it() -> None:
    tree, pins = make_tree()
    pin = pins.keep("a", CacheKey("", pack(1, 10)))
    tree.lock(pin.handle)
    assert (tree.pinned_pages, tree.protected_pages) == (0, 2)
    tree.unlock(pin.handle)
    assert (tree.pinned_pages, tree.protected_pages) == (2, 0)
    tree.lock(pin.handle)
    pin.drop()
    assert (tree.pinned_pages, tree.protected_pages) == (0, 2)
    tree.unlock(pin.handle)
    assert tree.evictable_pages == 4
    tree.check()


def test_the_least_recently_used_gives_way_first_and_no_more_than_needed() -> None:
    tree, pins = make_tree()
    kept = [pins.keep(name, CacheKey("", pack(1, 10 + n))) for n, name in enumerate("abc")]
    kept[0].touch()
    pins.unpin_for(1)
    assert [pin.name for pin in pins] == ["c", "a"]
    assert pins.take_lost() == [LostPin("b", 2, "its memory was needed")]
    assert pins.take_lost() == []
    pins.unpin_for(4)  # the common page stays with the last
    assert list(pins) == []
    assert tree.evictable_pages == 4
    tree.check()


def test_nothing_is_held_where_nothing_is_cached() -> None:
    for pins in (make_tree()[1], Pins(RadixCache(1, shares=False))):
        pin = pins.keep("a", CacheKey("", pack(7, 8)))
        assert pin.num_tokens == 0
        pin.touch()
        pin.drop()
        pins.lose_all("for nothing")
        assert pins.take_lost() == []
