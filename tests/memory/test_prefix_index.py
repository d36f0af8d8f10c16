"""Indexed sequences against their plain twin: look every one of them up again after each change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.memory.radix import Node, RadixCache, Root


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


class Indexed:
    """A tree, some watched sequences, and what the watch has told of them."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixCache(page_size)
        self.told: dict[int, int] = {}
        self.weights = SubtreeCounts()
        self.index = PrefixIndex(self.tree, self.told.__setitem__, self.weights)
        self.tree.listener = self.index
        self.sequences: dict[
            int, tuple[str, bytes]
        ] = {}  # namespace and the tokens that may be cached
        self.num_pages = 0

    def add(
        self, number: int, tokens: list[int], namespace: str = "", num_usable: int | None = None
    ) -> None:
        """Index the first `num_usable` of the tokens."""
        packed = pack(tokens)
        end = len(pack(tokens[:num_usable]))
        self.sequences[number] = namespace, packed[:end]
        self.told[number] = self.index.add(number, namespace, packed, end)

    def remove(self, number: int) -> None:
        del self.sequences[number], self.told[number]
        self.index.remove(number)

    def insert(self, tokens: list[int], namespace: str = "") -> object:
        first, self.num_pages = self.num_pages, self.num_pages + len(tokens)
        pages = np.arange(first, first + len(tokens), dtype=np.int32)
        return self.tree.insert(namespace, pack(tokens), pages).handle

    def check(self) -> None:
        for number, (namespace, packed) in self.sequences.items():
            assert (
                self.told[number] == self.index.length(number) == self.tree.peek(namespace, packed)
            )
        self.check_weights()

    def check_weights(self) -> None:
        """Counts are the numbers of sequences below, and the walk visits heavier children first, below to above."""
        ends = {
            n: self.tree.locate(s, packed, len(packed)).handle
            for n, (s, packed) in self.sequences.items()
        }
        weight: dict[Node, int] = {}
        for node in ends.values():
            while node is not None:
                weight[node] = weight.get(node, 0) + 1
                node = node.parent
        order = list(self.weights.heaviest_first())
        assert len(order) == len(set(order)) == len(weight)
        assert all(self.weights.of(node) == weight[node] for node in order)
        assert sorted(n for node in order for n in self.index.ending_at(node)) == sorted(
            self.sequences
        )
        place = {node: i for i, node in enumerate(order)}
        siblings: dict[object, list[Node]] = {}
        for node in order:
            siblings.setdefault(node.parent, []).append(node)
            if not isinstance(node, Root):
                assert place[node] < place[node.parent]
        for children in siblings.values():
            weights = [weight[node] for node in children]
            assert weights == sorted(weights, reverse=True)


def test_a_watched_sequence_follows_what_is_inserted_and_evicted() -> None:
    context = Indexed(page_size=2)
    context.add(1, [1, 2, 3, 4, 5, 6])
    context.add(2, [1, 2, 9, 9])
    context.insert([1, 2, 3, 4])
    assert context.told == {1: 4, 2: 2}
    context.insert([1, 2, 3, 4, 5, 6, 7, 8])
    assert context.told == {1: 6, 2: 2}
    context.check()
    context.tree.evict(2)
    assert context.told == {1: 4, 2: 2}
    context.tree.evict(2)
    assert context.told == {1: 0, 2: 0}
    context.check()


def test_a_split_moves_nobody_and_what_comes_behind_it_is_seen() -> None:
    context = Indexed(page_size=1)
    context.insert([1, 2, 3, 4])
    context.add(1, [1, 2, 8, 8])
    context.tree.match("", pack([1, 2]))
    assert context.told == {1: 2}
    context.insert([1, 2, 8, 7])
    assert context.told == {1: 3}
    context.check()


def test_a_namespace_that_was_dropped_and_comes_back_is_still_watched() -> None:
    context = Indexed(page_size=1)
    context.add(1, [1, 2, 3], "salt")
    context.insert([1, 2], "salt")
    context.tree.evict(2)
    assert context.told == {1: 0}
    context.insert([1], "salt")
    assert context.told == {1: 1}
    context.insert([1, 2, 3])
    assert context.told == {1: 1}
    context.check()


def test_a_cache_that_is_emptied_leaves_everybody_with_nothing() -> None:
    context = Indexed(page_size=1)
    context.insert([1, 2, 3])
    context.add(1, [1, 2, 5])
    context.tree.reset()
    assert context.told == {1: 0}
    context.insert([1, 2])
    assert context.told == {1: 2}
    context.check()


@pytest.mark.parametrize("seed", range(30))
def test_random_changes_keep_every_length_and_weight_true(seed: int) -> None:
    rng = random.Random(seed)
    context = Indexed(page_size=rng.choice([1, 2, 3]))
    locked: list[object] = []
    for number in range(250):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        namespace = rng.choice(["", "", "salt"])
        what = rng.random()
        if what < 0.35:
            context.add(
                number, tokens, namespace, rng.choice([None, rng.randrange(len(tokens) + 1)])
            )
        elif what < 0.5 and context.sequences:
            context.remove(rng.choice(list(context.sequences)))
        elif what < 0.75:
            handle = context.insert(tokens, namespace)
            if rng.random() < 0.2:
                context.tree.lock(handle)
                locked.append(handle)
        elif what < 0.85:
            context.tree.match(namespace, pack(tokens))
        elif what < 0.9 and locked:
            context.tree.unlock(locked.pop())
        elif what < 0.99:
            context.tree.evict(min(rng.randrange(1, 12), context.tree.evictable_pages))
        elif not locked:
            context.tree.reset()
        context.check()
        context.tree.check()
