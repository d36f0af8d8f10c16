"""The sum that must always hold: free + cached + held by requests = all pages, and each page is owned once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.memory.allocator import IntArray, PageAllocator
from weft.memory.prefix_cache import PrefixCache


class BrokenBooks(AssertionError):
    """A page is owned twice, or by nobody. The message names pages and owners."""


def audit(allocator: PageAllocator, cache: PrefixCache, held: Mapping[str, IntArray]) -> None:
    """Check the owner of every page. `held` maps the name of each holder to the pages that it alone owns.

    Raises BrokenBooks. Cost: proportional to the pool.
    """
    owners: dict[str, IntArray] = {"the free list": allocator.free_pages(), "the prefix cache": cache.owned_pages()}
    owners.update(held)
    count = np.zeros(allocator.num_pages, dtype=np.int32)
    for name, pages in owners.items():
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < allocator.num_pages):
            raise BrokenBooks(f"{name} has a page outside of the pool")
        np.add.at(count, pages, 1)
    for page in np.flatnonzero(count != 1)[:8].tolist():
        names = [name for name, pages in owners.items() if page in pages]
        raise BrokenBooks(f"page {page} is owned by {' and '.join(names) or 'nobody'}")
    cached = cache.evictable_pages + cache.protected_pages
    if cached != len(owners["the prefix cache"]):
        raise BrokenBooks(f"the prefix cache counts {cached} pages and holds {len(owners['the prefix cache'])}")
