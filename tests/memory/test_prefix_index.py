"""Indexed sequences against their plain twin: look every one of them up again after each change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.seeds import seeds
from weft.memory.index import prefix_index
from weft.memory.index.prefix_index import FEW_MOVES, MAX_MOVES, NUM_AT_ONCE, PrefixIndex
from weft.memory.index.subtree_counts import Anchor, SubtreeCounts, above
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


class Indexed:
    """A tree, some indexed sequences, and the lengths that the index has reported of them."""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.reported: dict[int, int] = {}
        self.counts = SubtreeCounts()
        self.index = PrefixIndex(self.cache, self.reported.__setitem__, self.counts)
        self.cache.tree.listeners.append(self.index)
        self.sequences: dict[int, CacheKey] = {}  # the tokens that may be cached
        self.num_pages = 0

    def add(
        self, number: int, tokens: list[int], namespace: str = "", num_usable: int | None = None
    ) -> None:
        """Index the first `num_usable` of the tokens."""
        key = CacheKey(namespace, pack(tokens))
        end = len(pack(tokens[:num_usable]))
        self.sequences[number] = CacheKey(namespace, key.tokens[:end])
        self.reported[number] = self.index.add(number, key, end)

    def remove(self, number: int) -> None:
        del self.sequences[number], self.reported[number]
        self.index.remove(number)

    def insert(self, tokens: list[int], namespace: str = "") -> object:
        first, self.num_pages = self.num_pages, self.num_pages + len(tokens)
        pages = np.arange(first, first + len(tokens), dtype=np.int32)
        return self.cache.insert(CacheKey(namespace, pack(tokens)), pages).handle

    def check(self) -> None:
        for number, key in self.sequences.items():
            assert self.reported[number] == self.index.length(number) == self.cache.peek(key)
        self.check_counts()

    def check_counts(self) -> None:
        """Counts are the numbers of sequences below. The walk goes from below to above, and visits
        heavier children first."""
        weight: dict[Anchor, int] = {}
        for key in self.sequences.values():
            handle = self.cache.tree.locate(key, len(key.tokens)).handle
            anchor: Anchor | None = key.namespace if handle is None else handle
            while anchor is not None:
                weight[anchor] = weight.get(anchor, 0) + 1
                anchor = above(anchor)
        order = list(self.counts.heaviest_first())
        assert len(order) == len(set(order)) == len(weight)
        assert all(self.counts.of(anchor) == weight[anchor] for anchor in order)
        numbers = [number for anchor in order for number in self.index.arrivals_at(anchor)]
        assert sorted(numbers) == sorted(self.sequences)
        position = {anchor: i for i, anchor in enumerate(order)}
        siblings: dict[Anchor | None, list[Anchor]] = {}
        for anchor in order:
            parent = above(anchor)
            siblings.setdefault(parent, []).append(anchor)
            assert parent is None or position[anchor] < position[parent]
        for children in siblings.values():
            weights = [weight[anchor] for anchor in children]
            assert weights == sorted(weights, reverse=True)


def test_an_indexed_sequence_follows_what_is_inserted_and_evicted() -> None:
    indexed = Indexed(page_size=2)
    indexed.add(1, [1, 2, 3, 4, 5, 6])
    indexed.add(2, [1, 2, 9, 9])
    indexed.insert([1, 2, 3, 4])
    assert indexed.reported == {1: 4, 2: 2}
    indexed.insert([1, 2, 3, 4, 5, 6, 7, 8])
    assert indexed.reported == {1: 6, 2: 2}
    indexed.check()
    indexed.cache.evict(2)
    assert indexed.reported == {1: 4, 2: 2}
    indexed.cache.evict(2)
    assert indexed.reported == {1: 0, 2: 0}
    indexed.check()


def test_a_split_moves_nobody_and_what_comes_behind_it_is_seen() -> None:
    indexed = Indexed(page_size=1)
    indexed.insert([1, 2, 3, 4])
    indexed.add(1, [1, 2, 8, 8])
    indexed.cache.match(CacheKey("", pack([1, 2])))
    assert indexed.reported == {1: 2}
    indexed.insert([1, 2, 8, 7])
    assert indexed.reported == {1: 3}
    indexed.check()


def test_a_namespace_that_was_dropped_and_comes_back_is_still_indexed() -> None:
    indexed = Indexed(page_size=1)
    indexed.add(1, [1, 2, 3], "salt")
    indexed.insert([1, 2], "salt")
    indexed.cache.evict(2)
    assert indexed.reported == {1: 0}
    indexed.insert([1], "salt")
    assert indexed.reported == {1: 1}
    indexed.insert([1, 2, 3])
    assert indexed.reported == {1: 1}
    indexed.check()


def test_a_cache_that_is_emptied_leaves_everybody_with_nothing() -> None:
    indexed = Indexed(page_size=1)
    indexed.insert([1, 2, 3])
    indexed.add(1, [1, 2, 5])
    indexed.cache.reset()
    assert indexed.reported == {1: 0}
    indexed.insert([1, 2])
    assert indexed.reported == {1: 2}
    indexed.check()


@pytest.mark.parametrize("num_at_once", [8, 0])
@pytest.mark.parametrize("seed", seeds(8, 20))
def test_random_changes_keep_every_length_and_weight_true(
    seed: int, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0, whoever stays where a node is split is filed anew later, as in a large family."""
    monkeypatch.setattr(prefix_index, "NUM_AT_ONCE", num_at_once)
    rng = random.Random(seed)
    indexed = Indexed(page_size=rng.choice([1, 2, 3]))
    locked: list[object] = []
    for number in range(250):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        namespace = rng.choice(["", "", "salt"])
        what = rng.random()
        if what < 0.35:
            indexed.add(
                number, tokens, namespace, rng.choice([None, rng.randrange(len(tokens) + 1)])
            )
        elif what < 0.5 and indexed.sequences:
            indexed.remove(rng.choice(list(indexed.sequences)))
        elif what < 0.75:
            handle = indexed.insert(tokens, namespace)
            if rng.random() < 0.2:
                indexed.cache.lock(handle)
                locked.append(handle)
        elif what < 0.85:
            indexed.cache.match(CacheKey(namespace, pack(tokens)))
        elif what < 0.9 and locked:
            indexed.cache.unlock(locked.pop())
        elif what < 0.99:
            indexed.cache.evict(min(rng.randrange(1, 12), indexed.cache.evictable_pages))
        elif not locked:
            indexed.cache.reset()
        while indexed.index._late:
            indexed.index.move_on()
        indexed.check()
        indexed.cache.check()


def test_a_family_of_thousands_moves_down_in_pieces() -> None:
    indexed = Indexed(page_size=1)
    num = 5 * MAX_MOVES
    for number in range(num):
        indexed.add(number, [1, 2, 3, 4, 10 + number])
    indexed.insert([1, 2, 3, 4])
    lengths = [indexed.index.length(number) for number in range(num)]
    assert lengths == [4] * MAX_MOVES + [0] * (num - MAX_MOVES)
    while indexed.index._late:
        indexed.index.move_on()
    indexed.check()
    assert {indexed.index.length(number) for number in range(num)} == {4}


@pytest.mark.parametrize("change", ["evicted", "split", "gone on", "left", "emptied"])
def test_who_is_still_to_move_down_ends_where_the_cache_says_whatever_comes_between(
    change: str,
) -> None:
    indexed = Indexed(page_size=1)
    num = 3 * MAX_MOVES
    for number in range(num):
        indexed.add(number, [1, 2, 3, 4, 5, 6 + number % 2])
    indexed.insert([1, 2, 3, 4])
    match change:
        case "evicted":
            indexed.cache.evict(3)
        case "split":
            indexed.cache.match(CacheKey("", pack([1, 2])))
            indexed.insert([1, 2, 9])
        case "gone on":
            indexed.insert([1, 2, 3, 4, 5, 6])
        case "left":
            for number in range(0, num, 2):
                indexed.remove(number)
        case "emptied":
            indexed.cache.reset()
    while indexed.index._late:
        indexed.index.move_on()
    indexed.check()


def test_a_large_family_in_a_node_that_is_split_is_filed_anew_in_pieces() -> None:
    indexed = Indexed(page_size=1)
    num = 2 * NUM_AT_ONCE * MAX_MOVES
    indexed.insert([1, 2, 3, 4, 5])
    for number in range(num):
        indexed.add(number, [1, 2, 3, 10 + number % 7, number])
    indexed.add(num, [1, 2, 3, 4, 5, 6])
    indexed.add(num + 1, [1, 2, 9])
    assert not indexed.index._late
    indexed.insert([1, 2, 3, 9])
    assert len(indexed.index._late) == num
    indexed.check()
    indexed.insert([1, 2, 3, 12, 40])
    while indexed.index._late:
        indexed.index.move_on()
    indexed.check()
    indexed.insert([1, 2, 3, 13, 40])
    while indexed.index._late:
        indexed.index.move_on()
    indexed.check()


def test_so_many_move_at_once_as_the_page_of_policies_says() -> None:
    assert (MAX_MOVES, FEW_MOVES, prefix_index.MANY) == (32, 8, 16_384)
    # A node that is split files as many anew at once as eight such moves would.
    assert NUM_AT_ONCE == 8


def test_fewer_move_at_once_where_very_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MANY", 3 * MAX_MOVES - 1)
    indexed = Indexed(page_size=1)
    for number in range(3 * MAX_MOVES):
        indexed.add(number, [1, 2, 3, 4])
    indexed.insert([1, 2])
    assert list(indexed.reported.values()).count(2) == FEW_MOVES
    indexed.index.move_on()
    assert list(indexed.reported.values()).count(2) == 2 * FEW_MOVES
