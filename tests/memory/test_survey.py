"""A look at the prefix tree in pieces finds the heaviest nodes, whatever happens meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.memory.index import survey
from weft.memory.index.survey import Survey, TreeSurvey
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache


def insert(cache: RadixCache, tokens: list[int], namespace: str = "") -> None:
    packed = np.array(tokens, dtype=np.int32)
    cache.insert(CacheKey(namespace, packed.tobytes()), np.arange(len(tokens), dtype=np.int32))


def walk(cache: RadixCache, piece: int = 3) -> Survey:
    walking = TreeSurvey(cache.tree.roots.values())
    while True:
        found = walking.look(piece)
        if found is not None:
            return found


def test_an_empty_tree_is_seen_at_once() -> None:
    assert walk(RadixCache(1)) == Survey((), 0, True)


@pytest.mark.parametrize("piece", [1, 2, 7, 1_000])
def test_sums_are_those_of_the_whole_tree_in_pieces_of_any_size(piece: int) -> None:
    cache = RadixCache(1)
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 9])
    insert(cache, [1, 2, 3, 4, 5, 6])
    insert(cache, [7], namespace="another")
    found = walk(cache, piece)
    assert found.num_nodes == 7  # two of them tops of namespaces
    told = {
        tuple(np.frombuffer(one.head, dtype=np.int32)): one.num_below
        for one in found.found
        if one.num_tokens
    }
    assert told == {(1, 2): 7, (3, 4): 4, (5, 6): 2, (9,): 1, (7,): 1}
    for place, one in enumerate(found.found):
        assert one.parent < place


def test_no_child_is_found_without_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_FOUND", 9)
    rng = random.Random(5)
    for _ in range(40):
        cache = RadixCache(1)
        for _ in range(30):
            insert(cache, [rng.randrange(3) for _ in range(rng.randrange(1, 9))])
        found = walk(cache).found
        assert len(found) == 9
        least = min(one.num_below for one in found)
        assert [one.parent < 0 for one in found].count(True) == 1
        assert all(found[one.parent].num_below >= one.num_below >= least for one in found[1:])


def test_a_walk_ends_when_it_has_seen_as_much_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_NODES", 20)
    cache = RadixCache(1)
    for number in range(100):
        insert(cache, [number, number + 1])
    found = walk(cache)
    assert (found.num_nodes, found.is_complete) == (20, False)


def test_a_tree_may_change_while_it_is_looked_at() -> None:
    rng = random.Random(2)
    cache = RadixCache(1)
    for _ in range(60):
        insert(cache, [rng.randrange(4) for _ in range(8)])
    walking = TreeSurvey(cache.tree.roots.values())
    found = None
    while found is None:
        found = walking.look(2)
        insert(cache, [rng.randrange(4) for _ in range(8)])
        cache.evict(min(4, cache.evictable_pages))
    assert found.num_nodes
    cache.check()
