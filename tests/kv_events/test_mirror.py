"""Events against the tree that they tell of."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.kv_events.readers import Blocks, blocks_of, read
from weft.kv_events.changes import ChangeNotes
from weft.kv_events.mirror import CacheMirror, block_hashes
from weft.kv_events.wire import BlockStored
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache

NAMESPACES = ("", "salt", "\0adapter\0", "\0adapter\0salt")


class Followed:
    """A tree, and a mirror that gets its changes without a thread between them."""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.notes = ChangeNotes()
        self.cache.tree.listeners.append(self.notes)
        self.mirror = CacheMirror(page_size)
        self.blocks: Blocks = {}
        self.next_page = 0

    def insert(self, namespace: str, tokens: list[int]) -> None:
        num_pages = len(tokens) // self.cache.page_size
        pages = np.arange(self.next_page, self.next_page + num_pages, dtype=np.int32)
        self.next_page += num_pages
        self.cache.insert(CacheKey(namespace, np.array(tokens, np.int32).tobytes()), pages)

    def check(self) -> None:
        """Reader and mirror have what the tree has."""
        read(self.blocks, self.mirror.apply(self.notes.take()))
        assert self.blocks == blocks_of(self.cache)
        late: Blocks = {}
        read(late, self.mirror.snapshot())
        assert late == self.blocks


@pytest.mark.parametrize("seed", range(12))
def test_whoever_follows_the_events_has_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    followed = Followed(page_size=rng.choice([1, 2, 4, 16]))
    cache = followed.cache
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        key = CacheKey(rng.choice(NAMESPACES), np.array(tokens, np.int32).tobytes())
        match rng.randrange(10):
            case 0:
                cache.match(key)  # may split a node
            case 1:
                cache.evict(rng.randrange(cache.evictable_pages + 1))
            case 2:
                cache.forget(cache.match(key).handle)
            case 3 if rng.random() < 0.1:
                cache.drop()
            case _:
                followed.insert(key.namespace, tokens)
        if rng.random() < 0.5:
            followed.check()
    followed.check()


def test_hashes_follow_from_the_tokens_however_the_tree_cuts_them() -> None:
    snapshot = block_hashes("", None, bytes(range(48)), 16)
    first = block_hashes("", None, bytes(range(16)), 16)
    assert first + block_hashes("", first[-1], bytes(range(16, 48)), 16) == snapshot
    assert len({*snapshot, *block_hashes("salt", None, bytes(range(48)), 16)}) == 6
    assert all(0 <= number < 1 << 63 for number in snapshot)


def test_a_block_tells_its_adapter_and_salt() -> None:
    followed = Followed(page_size=2)
    followed.insert("\0one\0two", [5, 6, 7, 8])
    (stored,) = followed.mirror.apply(followed.notes.take())
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [5, 6, 7, 8]
    assert (stored.lora_name, stored.cache_salt) == ("one", "two")
    assert stored.extra_keys == [["one", "two"], ["one"]]
    plain = Followed(page_size=2)
    plain.insert("", [5, 6])
    (stored,) = plain.mirror.apply(plain.notes.take())
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.cache_salt, stored.extra_keys) == (None, None, None)
