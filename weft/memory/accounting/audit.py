"""Checks the sum that must always hold, and that each page has exactly one owner.

    free + cached + owned by requests + quarantined = all pages

The audit reads the allocator and the cache, and gets the pages of requests as an argument; it knows
no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import PageAllocator
from weft.memory.radix.cache import RadixCache

FREE = "the free list"
CACHE = "the prefix cache"
QUARANTINE = "the quarantine"
MAX_FAULTS = 1_000  # faults that are reported one by one


class AccountingError(AssertionError):
    """A page has two owners, or none. The message names pages and owners."""


class Fault(NamedTuple):
    """A page that does not have exactly one owner, or whose counts are wrong."""

    page: int
    owners: list[str]
    pool: str = ""  # pool of the page, if a model has more than one
    detail: str = ""  # what else is wrong with the page

    def __str__(self) -> str:
        owners = " and ".join(self.owners) or "nobody"
        return f"{self.pool}page {self.page} is owned by {owners}{self.detail}"

    @property
    def users(self) -> set[str]:
        """Its owners, without the free list."""
        return set(self.owners) - {FREE}

    @property
    def is_owned(self) -> bool:
        return bool(self.users)


def audit(allocator: PageAllocator, cache: RadixCache, owned: Mapping[str, IntArray]) -> None:
    """Check the owner of every page. `owned` maps the name of each request to its own pages.

    Raises AccountingError. Cost: linear in the pool.
    """
    cached = cache.tree.owned_pages()
    for fault in find_faults_among(allocator, cached, owned):
        raise AccountingError(str(fault))
    counted = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
    if counted != len(cached):
        raise AccountingError(f"the prefix cache counts {counted} pages and holds {len(cached)}")


def find_faults(
    allocator: PageAllocator, cache: RadixCache, owned: Mapping[str, IntArray]
) -> list[Fault]:
    """The pages that do not have exactly one owner, at most MAX_FAULTS.

    Raises AccountingError for a page outside of the pool.
    """
    return find_faults_among(allocator, cache.tree.owned_pages(), owned)


def find_faults_among(
    allocator: PageAllocator,
    cached: IntArray,
    owned: Mapping[str, IntArray],
    *,
    pool: str = "",
) -> list[Fault]:
    """Like `find_faults`, for a pool of which the cache owns the pages `cached`."""
    owners: dict[str, IntArray] = {
        FREE: allocator.free_pages(),
        CACHE: cached,
        QUARANTINE: np.array(sorted(allocator.quarantined), dtype=np.int32),
        **owned,
    }
    num_pages = allocator.num_pages
    all_owned = np.concatenate(list(owners.values()))
    if len(all_owned) and not (all_owned.min() >= 0 and all_owned.max() < num_pages):
        for name, pages in owners.items():
            if ((pages < 0) | (pages >= num_pages)).any():
                raise AccountingError(f"{name} has a {pool}page outside of the pool")
    count = np.bincount(all_owned, minlength=num_pages)
    found = np.flatnonzero(count != 1)[:MAX_FAULTS]
    if not len(found):
        return []
    names: dict[int, list[str]] = {page: [] for page in found.tolist()}
    for name, pages in owners.items():
        for page in pages[np.isin(pages, found)].tolist():
            names[page].append(name)
    return [Fault(page, names[page], pool) for page in names]
