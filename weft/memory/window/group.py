"""The layers with windows as one group: their pages, the pages of each row, and the tails in the
cache.

Positions are those of the whole sequence. A row holds the pages from `first` on; earlier pages are
completely outside of every window that its next tokens see:

    0 ............ first ............ end - window + 1 ........ end ......... kv_len
        | freed        | page that is seen in part | seen after `end`  | page that is begun |

`end` is the last page border before the last token: up to there the row can insert its tokens into
the cache, so it holds the window before `end` until the next page is full.

Layers with different windows share the group: it keeps what the widest window sees. If tokens see
their own chunk of the context, `end` sees what its chunk has before it, at most as much as with a
window of that size. This module knows rows and keys, never a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.config.sight import Sight
from weft.memory.accounting.pins import Pins
from weft.memory.allocator import PageAllocator, Write, num_pages_for, slots_of
from weft.memory.radix.tree import Node
from weft.memory.window.pool import WindowPool
from weft.memory.window.tails import Tail, WindowTails


class WindowGroup:
    """`sight`: what a token sees. `shape`: rows, and positions of each."""

    def __init__(
        self,
        *,
        sight: Sight,
        num_pages: int,
        page_size: int,
        shape: tuple[int, int],
        pins: Pins,
    ) -> None:
        self.sight = sight
        self.page_size = page_size
        self.pool = WindowPool(PageAllocator(num_pages, page_size))
        self.tails = WindowTails(self.pool, sight, page_size)
        self.slots: IntArray = np.zeros(shape, dtype=np.int32)  # [row, position]
        # [row] first position that the row holds, a page border
        self.first: IntArray = np.zeros(shape[0], dtype=np.int32)
        self.writes: list[Write] = []  # slots of cached tails, until the next plan takes them
        self._pins = pins

    # Capacity

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pool, without its quarantined pages."""
        allocator = self.pool.allocator
        return (allocator.num_pages - len(allocator.quarantined)) * self.page_size

    @property
    def available(self) -> int:
        """Tokens that could be allocated now. Pins are removed if necessary."""
        return self.pool.available_pages * self.page_size

    @property
    def full_row(self) -> int:
        """Tokens that fit into the pages of a decoding row, whatever its length."""
        # The window before `end`, the partly filled page, and the next page, which is taken before
        # the step that fills it frees another one.
        return (num_pages_for(self.sight.window - 1, self.page_size) + 2) * self.page_size

    def growth(self, rows: IntArray, kv_len: IntArray) -> IntArray:
        """[n] how many more tokens rows [n] of `kv_len` [n] tokens can hold before they free as
        many as they take."""
        owned = kv_len - self.first[rows]
        left: IntArray = np.maximum(self.full_row - owned, 0)
        return left

    def growth_after(self, length: int) -> int:
        """The same for a row that has just computed the first `length` tokens of its prompt."""
        if self.sight.chunked:
            length -= self.sight.first(length - 1)
        return max(self.full_row - length, 0)

    # Rows

    def begin(self, row: int, pages: IntArray, length: int) -> None:
        """Let a row begin with the `pages` that it holds of a prefix of `length` tokens."""
        start = length - len(pages) * self.page_size
        self.first[row] = start
        if len(pages):
            slots = slots_of(pages, self.page_size)
            self.slots[row, start:length] = slots
            self.writes.append((row, start, slots))

    def extend(self, row: int, start: int, end: int, owner: int) -> IntArray:
        """Allocate the slots [end - start] of the next tokens of a row; `start` is a page
        border."""
        pages = self._alloc(num_pages_for(end - start, self.page_size), owner)
        slots = slots_of(pages, self.page_size)[: end - start]
        self.slots[row, start:end] = slots
        return slots

    def extend_running(self, rows: IntArray, positions: IntArray, ids: LongArray) -> IntArray:
        """Allocate the slots [T] of T tokens of decoding rows, like `KvMemory.extend_running`.

        `ids` are the owners of the tokens that begin a page.
        """
        in_page = positions % self.page_size
        first = positions - in_page
        begins_page = in_page == 0
        pages = self._alloc(len(ids), ids)
        self.slots[rows[begins_page], first[begins_page]] = pages * self.page_size
        taken: IntArray = self.slots[rows, first] + in_page
        self.slots[rows, positions] = taken
        return taken

    def cut(self, row: int, kv_len: int, before: int) -> None:
        """Keep the first `kv_len` of a row's `before` tokens: free the pages after them."""
        begin = num_pages_for(kv_len, self.page_size) * self.page_size
        if begin < before:
            self.pool.give_back(self._pages(row, begin, before))

    def withdraw(self, row: int, start: int, end: int) -> None:
        """Free the pages of a row from `start`, a page border, to `end`."""
        self.pool.give_back(self._pages(row, start, end))

    def give_back(self, rows: IntArray, kv_len: IntArray) -> None:
        """Free the pages before the windows of rows [n] of `kv_len` [n] tokens.

        Not between the planning of a step and its launch, because steps read the pages of their
        plan.
        """
        end = kv_len - 1
        end -= end % self.page_size
        needed = self.sight.firsts(end)
        needed -= needed % self.page_size
        has_old_pages = self.first[rows] < needed
        if not has_old_pages.any():
            return
        rows = rows[has_old_pages]
        starts = self.first[rows]
        ends = needed[has_old_pages]
        pieces = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            pieces.append(self._pages(row, start, end))
        self.first[rows] = ends
        self.pool.give_back(np.concatenate(pieces))

    def leave(self, row: int, handle: Node | None, length: int, since: int) -> None:
        """The first `length` tokens of a row, whole pages, are in the cache now, up to `handle`;
        the first `since` of them were there before. Keep the row's pages for them as tails."""
        first = int(self.first[row])
        if length <= first:
            return
        owned = Tail(self._pages(row, first, length), length // self.page_size)
        self.tails.leave(handle, owned, since // self.page_size)

    def end(self, row: int, kv_len: int) -> None:
        """Free the pages of a row."""
        self.pool.give_back(self.pages_of(row, kv_len))
        self.first[row] = 0

    def pages_of(self, row: int, kv_len: int) -> IntArray:
        """The pages that a row of `kv_len` tokens holds."""
        return self._pages(row, int(self.first[row]), kv_len)

    def reset(self) -> None:
        """Free all pages of rows and cache. Reads no state that a fault may have damaged."""
        self.tails.forget()
        self.pool.reset()
        self.first[:] = 0
        self.writes = []

    def recount(self, rows: IntArray, kv_len: IntArray, apart: Sequence[IntArray]) -> None:
        """Count the users of pages again, from rows [n] of `kv_len` [n] tokens, other holders of
        the pages `apart`, and tails."""
        owned = list(apart)
        for row, length in zip(rows.tolist(), kv_len.tolist(), strict=True):
            owned.append(self.pages_of(row, length))
        kept = [tail.pages for _, tail in self.tails.all()]
        self.pool.recount(owned, kept)

    # Inside

    def _pages(self, row: int, start: int, end: int) -> IntArray:
        return self.slots[row, start : end : self.page_size] // self.page_size

    def _alloc(self, num_pages: int, owners: int | LongArray) -> IntArray:
        """Allocate pages, evicting tails if too few are free. Admission has made sure that there
        are enough."""
        missing = num_pages - self.pool.allocator.num_free
        while missing > 0:
            missing -= self.tails.evict(missing)
            if missing > 0 and not self._pins.unpin_oldest():
                break  # the allocator raises an error
        return self.pool.alloc(num_pages, owners)
