"""The sum that must always hold: free + cached + held by requests (+ quarantined) = all pages, each owned once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weft.memory.allocator import IntArray, PageAllocator
from weft.memory.prefix_cache import PrefixCache

FREE, CACHE, QUARANTINE = "the free list", "the prefix cache", "the quarantine"
MAX_FAULTS = 1_000  # that are told one by one


class AccountingError(AssertionError):
    """A page is owned twice, or by nobody. The message names pages and owners."""


class Fault(NamedTuple):
    """A page that has not exactly one owner."""

    page: int
    owners: list[str]

    def __str__(self) -> str:
        return f"page {self.page} is owned by {' and '.join(self.owners) or 'nobody'}"


def audit(allocator: PageAllocator, cache: PrefixCache, held: Mapping[str, IntArray]) -> None:
    """Check the owner of every page. `held` maps the name of each holder to the pages that it alone owns.

    Raises AccountingError. Cost: proportional to the pool.
    """
    for fault in find_faults(allocator, cache, held):
        raise AccountingError(str(fault))
    counted = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
    cached = len(cache.owned_pages())
    if counted != cached:
        raise AccountingError(f"the prefix cache counts {counted} pages and holds {cached}")


def find_faults(
    allocator: PageAllocator, cache: PrefixCache, held: Mapping[str, IntArray]
) -> list[Fault]:
    """The pages that have not exactly one owner, at most MAX_FAULTS. Raises AccountingError for one outside of the pool."""
    owners: dict[str, IntArray] = {
        FREE: allocator.free_pages(),
        CACHE: cache.owned_pages(),
        QUARANTINE: np.array(sorted(allocator.quarantined), dtype=np.int32),
        **held,
    }
    for name, pages in owners.items():
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < allocator.num_pages):
            raise AccountingError(f"{name} has a page outside of the pool")
    count = np.bincount(np.concatenate(list(owners.values())), minlength=allocator.num_pages)
    found = np.flatnonzero(count != 1)[:MAX_FAULTS]
    names: dict[int, list[str]] = {page: [] for page in found.tolist()}
    for name, pages in owners.items() if names else ():
        for page in pages[np.isin(pages, found)].tolist():
            names[page].append(name)
    return [Fault(page, names[page]) for page in names]
