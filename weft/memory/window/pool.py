"""The pages of layers with windows, which several users may share, with counts of the users.

A page is *owned* by the rows that read it, and *kept* by tails of the prefix cache (`tails.py`). It
becomes free when it has no user. So a row that begins after a cached prefix needs no lock on the
cache: it holds the pages itself, even if the tail is evicted. This module knows neither rows nor
tails.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.memory.allocator import PageAllocator


class WindowPool:
    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        num_pages = allocator.num_pages
        # number of rows that read each page
        self.owned: IntArray = np.zeros(num_pages, dtype=np.int32)
        self.kept: IntArray = np.zeros(num_pages, dtype=np.int32)  # number of tails with each page
        self.num_owned = 0  # pages that rows own
        self.evictable_pages = 0  # pages that only tails keep

    @property
    def available_pages(self) -> int:
        """Pages that could be allocated now: free, or evictable."""
        return self.allocator.num_free + self.evictable_pages

    def alloc(self, num_pages: int, owners: int | LongArray) -> IntArray:
        """Take free pages, each for one row. Raises OutOfPages; then none has been taken."""
        pages = self.allocator.alloc(num_pages, owners)
        self.owned[pages] = 1
        self.num_owned += num_pages
        return pages

    def hold(self, pages: IntArray) -> None:
        """One more row reads these pages, all of which are kept or owned."""
        num_new = int(np.count_nonzero(self.owned[pages] == 0))
        self.owned[pages] += 1
        self.num_owned += num_new
        self.evictable_pages -= num_new

    def give_back(self, pages: IntArray) -> None:
        """One row less reads each of these pages. A page may be listed for several rows."""
        np.subtract.at(self.owned, pages, 1)
        left = np.unique(pages[self.owned[pages] == 0])
        is_kept = self.kept[left] > 0
        self.num_owned -= len(left)
        self.evictable_pages += int(np.count_nonzero(is_kept))
        self.allocator.free(left[~is_kept])

    def keep(self, pages: IntArray) -> None:
        """One more tail has these pages, all of which are owned or kept."""
        self.kept[pages] += 1

    def drop(self, pages: IntArray) -> int:
        """A tail drops these pages. Returns how many of them became free."""
        self.kept[pages] -= 1
        is_free = (self.kept[pages] == 0) & (self.owned[pages] == 0)
        free = pages[is_free]
        self.evictable_pages -= len(free)
        self.allocator.free(free)
        return len(free)

    def is_evictable(self, pages: IntArray) -> bool:
        """Whether some of these pages are owned by no row, so that dropping a tail may free
        them."""
        return bool((self.owned[pages] == 0).any())

    def recount(self, owned: Iterable[IntArray], kept: Iterable[IntArray]) -> None:
        """Count the users again, from the pages of each row and of each tail."""
        self.owned[:] = 0
        self.kept[:] = 0
        for pages in owned:
            self.owned[pages] += 1
        for pages in kept:
            self.kept[pages] += 1
        self.num_owned = int(np.count_nonzero(self.owned))
        self.evictable_pages = int(np.count_nonzero((self.owned == 0) & (self.kept > 0)))

    def lose(self, pages: IntArray) -> None:
        """Quarantine pages whose only holder will never return them."""
        self.owned[pages] -= 1
        self.num_owned -= len(pages)
        for page in pages.tolist():
            self.allocator.quarantine(page, is_owned=False)

    def withhold(self, pages: IntArray) -> IntArray:
        """Hold the free ones of these pages. Returns them."""
        taken = self.allocator.withhold(pages)
        self.owned[taken] = 1
        self.num_owned += len(taken)
        return taken

    def reset(self) -> None:
        """Free all pages, whatever their users. Reads no state that a fault may have damaged."""
        self.owned[:] = 0
        self.kept[:] = 0
        self.num_owned = 0
        self.evictable_pages = 0
        self.allocator.reset()

    @property
    def imbalance(self) -> int:
        """free + quarantined + evictable + owned - all: pages that are counted twice, or, if
        negative, not at all."""
        allocator = self.allocator
        num_free = allocator.num_free + len(allocator.quarantined)
        return num_free + self.evictable_pages + self.num_owned - allocator.num_pages
