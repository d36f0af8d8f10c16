"""Hands out pages of KV slots (SGLang: TokenToKVPoolAllocator, and its paged twin; a page of one
slot is no special case). Knows nothing of the owner of a page: `accounting/audit.py` does."""

from __future__ import annotations

import numpy as np

from weft.arrays import BoolArray, IntArray


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class PageAllocator:
    """A stack of free pages. Taking or returning n pages is one slice.

    _free: | page page page ... page | taken |
           0                    num_free   num_pages
                                ^ the top of the stack
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = _all_pages(num_pages)
        self.num_free = num_pages
        self.quarantined: set[int] = set()  # pages that have no owner and are given to none
        self._is_bad: BoolArray | None = None  # [num_pages], once there is one

    def alloc(self, n: int) -> IntArray:
        """Take n pages [n]. Raises OutOfPages if fewer are free; then nothing has been taken."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages asked for, {self.num_free} of {self.num_pages} are free")
        self.num_free -= n
        return self._free[self.num_free : self.num_free + n].copy()

    def free(self, pages: IntArray) -> None:
        """Return pages [n]. Each must have been taken, and not been returned since."""
        if self._is_bad is not None:
            bad = self._is_bad[pages]
            self.quarantined.update(pages[bad].tolist())
            pages = pages[~bad]
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._free[self.num_free : end] = pages
        self.num_free = end

    def reset(self) -> None:
        """Free every page, whatever its owner, but for those out of circulation.

        Reads nothing that a fault may have spoilt.
        """
        free = _all_pages(self.num_pages)
        if self._is_bad is not None:
            free = free[~self._is_bad[free]]
            self.quarantined = set(np.flatnonzero(self._is_bad).tolist())
        self._free[: len(free)] = free
        self.num_free = len(free)

    def quarantine(self, page: int, *, is_owned: bool) -> None:
        """Take a page out of circulation: now if it is free, else when its owner returns it."""
        if self._is_bad is None:
            self._is_bad = np.zeros(self.num_pages, dtype=np.bool_)
        self._is_bad[page] = True
        free = self._free[: self.num_free]
        free = free[free != page]
        self.num_free = len(free)
        self._free[: self.num_free] = free
        if not is_owned:
            self.quarantined.add(page)

    def free_pages(self) -> IntArray:
        """The free pages [num_free], for the audit."""
        return self._free[: self.num_free].copy()


def _all_pages(num_pages: int) -> IntArray:
    """Every page [num_pages], page 0 on the top of the stack."""
    return np.arange(num_pages - 1, -1, -1, dtype=np.int32)


def slots_of(pages: IntArray, page_size: int) -> IntArray:
    """The slots [n * page_size] of pages [n], in order."""
    if page_size == 1:
        return pages
    offsets = np.arange(page_size, dtype=np.int32)
    return (pages[:, None] * page_size + offsets).ravel().astype(np.int32, copy=False)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
