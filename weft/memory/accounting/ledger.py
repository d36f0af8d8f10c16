"""Counts the pages that requests hold as they come and go, so that the sum of all can be checked in every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.memory.allocator import IntArray, PageAllocator
from weft.memory.prefix_cache import PrefixCache

NOBODY = -1


class Ledger:
    def __init__(self, allocator: PageAllocator, cache: PrefixCache) -> None:
        self._allocator = allocator
        self._cache = cache
        self.num_held = 0  # pages that requests hold besides the cache's
        self.last_holder: NDArray[np.int64] = np.full(allocator.num_pages, NOBODY)  # [page] id of a request

    def took(self, pages: IntArray, ids: int | NDArray[np.int64]) -> None:
        """Requests `ids`, one for all or one for each page, have been given `pages` [n]."""
        self.num_held += len(pages)
        self.last_holder[pages] = ids

    def gave(self, num_pages: int) -> None:
        """A request has given so many pages back, or left them to the cache."""
        self.num_held -= num_pages

    @property
    def imbalance(self) -> int:
        """Pages that are counted too often, or, below 0, not at all."""
        allocator, cache = self._allocator, self._cache
        cached = cache.evictable_pages + cache.held_pages + cache.protected_pages
        return allocator.num_free + len(allocator.quarantined) + cached + self.num_held - allocator.num_pages
