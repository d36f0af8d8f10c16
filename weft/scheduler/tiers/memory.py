"""What transfers have of KV memory: pages, locks in the tree, and resume states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import NOBODY
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey, Handle
from weft.memory.radix.tree import pages_of
from weft.scheduler.kv import KvMemory
from weft.scheduler.tiers.table import Transfer


class TransferPages(NamedTuple):
    """The pages of a transfer, and the locked part of the tree."""

    pages: IntArray
    handle: Handle


class TransferMemory:
    def __init__(self, kv: KvMemory) -> None:
        self._kv = kv
        self._cache = kv.cache
        self._allocator = kv.allocator
        self._resume_states = kv.resume_states
        self._page_size = kv.page_size

    def resumable(self, key: CacheKey) -> int:
        """Tokens at the beginning of this sequence that a request could use from the cache."""
        return self._resume_states.resumable(self._cache.match(key))

    def resumable_lengths(self, key: CacheKey, block_len: int) -> list[int]:
        """The lengths, shortest first, at which the cached part of a sequence can be stored so that
        it can be resumed."""
        return self._resume_states.resumable_lengths(self._cache, key, block_len)

    # Reads

    def reserve(self, key: CacheKey, start: int) -> TransferPages | None:
        """Reserve pages for the tokens of `key` from `start` on, and lock the part before. None if
        memory does not allow it, or if the cached part does not end there."""
        num_pages = (key.num_tokens - start) // self._page_size
        before = self._cache.match(key.first(start))
        if before.length != start:
            return None
        self._cache.lock(before.handle)
        # Pinned memory of sessions is not taken.
        if num_pages > self._allocator.num_free + self._cache.evictable_pages:
            self._cache.unlock(before.handle)
            return None
        return TransferPages(self._kv.alloc(num_pages, NOBODY), before.handle)

    def insert(self, transfer: Transfer, num_tokens: int, *, has_resume_state: bool) -> int:
        """Insert the tokens that were read into the tree, and unlock the part before. Returns the
        number of tokens that are new in the tree, or that requests can use for the first time."""
        page_size = self._page_size
        end = transfer.start + num_tokens
        key = transfer.key.first(end)
        # 0 ...... start ...... present ...... end ...... transfer.end
        # | locked   | computed since | new     | not read   |
        before = pages_of(transfer.handle)
        inserted = self._cache.insert(key, np.concatenate([before, transfer.pages]))
        num_twice = (inserted.present - transfer.start) // page_size
        num_landed = num_tokens // page_size
        self._allocator.free(transfer.pages[:num_twice])
        self._allocator.free(transfer.pages[num_landed:])
        self._kv.landed(transfer.pages[num_twice:num_landed])
        num_new = end - inserted.present
        if len(transfer.resume_state) and has_resume_state and end == transfer.end:
            num_new = end - self.resumable(key)
            self._resume_states.arrived(inserted.handle, end, transfer.resume_state)
        elif len(transfer.resume_state):
            self._resume_states.memory.give_back(transfer.resume_state)
        self._cache.unlock(transfer.handle)
        return num_new

    def free(self, transfer: Transfer) -> None:
        """Free the pages that were reserved for a read."""
        self._allocator.free(transfer.pages)
        if len(transfer.resume_state):
            self._resume_states.memory.give_back(transfer.resume_state)

    def quarantine(self, transfer: Transfer) -> None:
        """Somebody may write into the pages of a read at any time."""
        for page in transfer.pages.tolist():
            self._allocator.quarantine(page, is_owned=False)
        if len(transfer.resume_state):
            self._resume_states.memory.lose(transfer.resume_state)

    def withhold(self, transfer: Transfer) -> None:
        """After all memory was freed, reserve again what a thread may still write into."""
        transfer.pages = self._allocator.withhold(transfer.pages)
        if len(transfer.resume_state):
            transfer.resume_state = self._resume_states.memory.withhold(transfer.resume_state)

    # Writes

    def lock(self, key: CacheKey, start: int) -> TransferPages:
        """Lock `key`, all of which is cached. Returns its pages from `start` on."""
        found = self._cache.match(key)
        assert found.length * TOKEN_BYTES == len(key.tokens), "what is to be written is not cached"
        self._cache.lock(found.handle)
        return TransferPages(found.pages[start // self._page_size :], found.handle)

    def hold_resume_state(self, transfer: Transfer) -> None:
        transfer.resume_state = self._resume_states.hold(transfer.handle)

    def let_go(self, transfer: Transfer) -> None:
        """Release the nodes and the resume state of a write."""
        if len(transfer.resume_state):
            self._resume_states.let_go(transfer.handle, transfer.resume_state)
        self._cache.unlock(transfer.handle)

    # Both

    def unlock(self, transfer: Transfer) -> None:
        self._cache.unlock(transfer.handle)
