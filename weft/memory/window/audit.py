"""The audit of pages that rows and tails share: each page must be counted once per user.

    free + quarantined + owned by rows + kept by tails alone = all pages

The audit gets the pages of requests by name, and knows no request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.audit import (
    CACHE,
    FREE,
    MAX_FAULTS,
    QUARANTINE,
    AccountingError,
    Fault,
)
from weft.memory.window.group import WindowGroup

WINDOWS = "window "  # the pool, in the report of a fault


def audit_windows(group: WindowGroup, owned: Mapping[str, IntArray]) -> None:
    """Check all counts of pages. `owned` maps the name of each request to the pages that it owns.

    Raises AccountingError. Cost: linear in the pool.
    """
    for fault in find_window_faults(group, owned):
        raise AccountingError(str(fault))
    pool = group.pool
    num_owned = int(np.count_nonzero(pool.owned))
    num_evictable = int(np.count_nonzero((pool.owned == 0) & (pool.kept > 0)))
    if (num_owned, num_evictable) != (pool.num_owned, pool.evictable_pages):
        raise AccountingError(
            f"the pool of windows counts {pool.num_owned} pages owned by rows and "
            f"{pool.evictable_pages} evictable, and has {num_owned} and {num_evictable}"
        )


def find_window_faults(group: WindowGroup, owned: Mapping[str, IntArray]) -> list[Fault]:
    """The pages that are free and used, or neither, or whose counts are wrong; at most MAX_FAULTS.

    Raises AccountingError for a page outside of the pool.
    """
    pool = group.pool
    allocator = pool.allocator
    num_pages = allocator.num_pages
    kept = [tail.pages for _, tail in group.tails.all()]
    quarantined = np.array(sorted(allocator.quarantined), dtype=np.int32)
    free = _count([allocator.free_pages()], num_pages, FREE)
    out = _count([quarantined], num_pages, QUARANTINE)
    by_rows = _count(list(owned.values()), num_pages, "a request")
    by_tails = _count(kept, num_pages, CACHE)
    is_used = (by_rows + by_tails > 0).astype(np.int64)
    is_wrong = (free + out + is_used != 1) | (by_rows != pool.owned) | (by_tails != pool.kept)
    faults = []
    for page in np.flatnonzero(is_wrong)[:MAX_FAULTS].tolist():
        owners = [FREE] * int(free[page]) + [QUARANTINE] * int(out[page])
        owners += [CACHE] * bool(by_tails[page])
        owners += [name for name, pages in owned.items() if page in pages]
        counted = f" (counted for {pool.owned[page]} rows and {pool.kept[page]} tails)"
        faults.append(Fault(page, owners, WINDOWS, counted))
    return faults


def _count(pieces: list[IntArray], num_pages: int, name: str) -> IntArray:
    """[num_pages] how often each page is in the pieces."""
    pages = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < num_pages):
        raise AccountingError(f"{name} has a page outside of the pool of windows")
    return np.bincount(pages, minlength=num_pages).astype(np.int32)
