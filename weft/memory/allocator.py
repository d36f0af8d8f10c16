"""Allocates the memory of running requests: a row, and pages of KV slots.

`PageAllocator` is SGLang's TokenToKVPoolAllocator and its paged variant (pages of one slot are not
a special case), `RowTable` is its ReqToTokenPool. They know owners by number, for reports of
faults; `accounting/audit.py` checks that each page has exactly one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray

NOBODY = -1  # the owner of a page that was never allocated

Write = tuple[int, int, IntArray]  # row, first position, slots


class OutOfPages(Exception):
    """More pages were requested than are free."""


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
        self.quarantined: set[int] = set()  # pages that have no owner and are never allocated
        self._is_bad: BoolArray | None = None  # [num_pages], after the first quarantine
        # [num_pages] the last owner of each page, so that a report of a fault can name it.
        self.last_owner: LongArray = np.full(num_pages, NOBODY)

    def alloc(self, n: int, owners: int | LongArray = NOBODY) -> IntArray:
        """Take n pages [n] for one owner, or for one owner each.

        Raises OutOfPages if fewer pages are free; then none has been taken.
        """
        if n > self.num_free:
            raise OutOfPages(f"{n} pages asked for, {self.num_free} of {self.num_pages} are free")
        self.num_free -= n
        pages = self._free[self.num_free : self.num_free + n].copy()
        # numpy's own index type: otherwise numpy converts more slowly.
        self.last_owner[pages.astype(np.intp)] = owners
        return pages

    def free(self, pages: IntArray) -> None:
        """Return pages [n]. Each page must be taken."""
        if self._is_bad is not None:
            bad = self._is_bad[pages]
            self.quarantined.update(pages[bad].tolist())
            pages = pages[~bad]
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._free[self.num_free : end] = pages
        self.num_free = end

    def reset(self) -> None:
        """Free every page, whatever its owner, except quarantined ones.

        Reads no state that a fault may have damaged.
        """
        free = _all_pages(self.num_pages)
        if self._is_bad is not None:
            free = free[~self._is_bad[free]]
            self.quarantined = set(np.flatnonzero(self._is_bad).tolist())
        self._free[: len(free)] = free
        self.num_free = len(free)

    def withhold(self, pages: IntArray) -> IntArray:
        """Take the free ones of these pages. Returns them."""
        free = self._free[: self.num_free]
        is_taken = np.isin(free, pages)
        taken: IntArray = free[is_taken].copy()
        left = free[~is_taken]
        self.num_free = len(left)
        self._free[: self.num_free] = left
        return taken

    def quarantine(self, page: int, *, is_owned: bool) -> None:
        """Take a page out of use: now if it is free, else when its owner frees it."""
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


class RowTable:
    """The pages of the tokens of each running request, and the free rows.

    The runner keeps a table of slots on its device and updates it from the plans. Changes that do
    not follow from the slots of a plan (a cached prefix, duplicates replaced by the tree's pages)
    are logged here until the next plan takes them.

    `limit` rows may be in use. It can be changed; rows in use above it are used to their end.
    """

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        page_size: int,
        limit: int | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.limit = num_rows if limit is None else limit
        self.page_size = page_size
        self.max_pages = num_pages_for(max_len, page_size)  # pages per row
        # [row, position // page_size]. A table of slots would be `page_size` times as long, and a
        # step over thousands of rows would wait for memory (16 tokens per page, 4,096 rows: 60 us
        # more).
        self.pages: IntArray = np.zeros((num_rows, self.max_pages), dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Free every row, whatever its owner, and clear the log."""
        self._free = list(range(self.num_rows - 1, -1, -1))
        # Writes of `point`, until the next plan takes them.
        self.writes: list[Write] = []

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of rows that may be taken now."""
        num_used = self.num_rows - len(self._free)
        return max(self.limit - num_used, 0)

    def alloc(self) -> int:
        """Take a row. The caller has checked `num_free`."""
        return self._free.pop()

    def free(self, row: int) -> None:
        assert row not in self._free, "a row was freed twice"
        self._free.append(row)

    def point(self, row: int, start: int, pages: IntArray) -> None:
        """Write `pages` [n] into a row from position `start` on, a page border, and log their slots
        for the next plan."""
        begin = start // self.page_size
        self.pages[row, begin : begin + len(pages)] = pages
        self.log(row, start, slots_of(pages, self.page_size))

    def log(self, row: int, start: int, slots: IntArray) -> None:
        """Tell the next plan that a row has these slots from position `start` on."""
        self.writes.append((row, start, slots))

    def pages_of(self, row: int, start: int, end: int) -> IntArray:
        """The pages of positions start..end of a row; `start` is a page border."""
        begin = start // self.page_size
        found: IntArray = self.pages[row, begin : num_pages_for(end, self.page_size)].copy()
        return found

    def slots_of(self, row: int, start: int, end: int) -> IntArray:
        """The slots [end - start] of positions start..end of a row."""
        skipped = start % self.page_size
        slots = slots_of(self.pages_of(row, start - skipped, end), self.page_size)
        return slots[skipped : skipped + end - start]

    def slots_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The slots [T] of token `positions[i]` of `rows[i]`."""
        num_before = positions // self.page_size
        in_page = positions - num_before * self.page_size
        slots: IntArray = self.pages[rows, num_before] * np.int32(self.page_size) + in_page
        return slots

    def take_writes(self) -> list[Write]:
        """The writes of `point` since the last call, in order."""
        writes = self.writes
        self.writes = []
        return writes


def _all_pages(num_pages: int) -> IntArray:
    """Every page [num_pages], with page 0 on top of the stack."""
    return np.arange(num_pages - 1, -1, -1, dtype=np.int32)


def slots_of(pages: IntArray, page_size: int) -> IntArray:
    """The slots [n * page_size] of pages [n], in order."""
    if page_size == 1:
        return pages
    offsets = np.arange(page_size, dtype=np.int32)
    return (pages[:, None] * page_size + offsets).ravel().astype(np.int32, copy=False)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


class JoinedWrites(NamedTuple):
    """The fields of `plan.step.TableWrites`."""

    rows: IntArray  # [W]
    starts: IntArray  # [W]
    lens: IntArray  # [W]
    slots: IntArray  # [sum of lens]


def joined(writes: Sequence[Write]) -> JoinedWrites:
    """Changes of a table of slots as arrays; there is at least one."""
    rows: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    slots: list[IntArray] = []
    for row, start, pointed in writes:
        rows.append(row)
        starts.append(start)
        lens.append(len(pointed))
        slots.append(pointed)
    return JoinedWrites(
        rows=np.array(rows, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        lens=np.array(lens, dtype=np.int32),
        slots=np.concatenate(slots),
    )
