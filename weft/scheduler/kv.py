"""What a request does with KV memory: find its prefix, take a row and pages, leave what it computed to the cache.

Puts rows, allocator and prefix cache together, so that the rest of the scheduler says what happens and not how pages
move. Steps run on the device in the order in which they are launched; therefore what a launched step will write may be
shared, and what it will read may be freed, before it has run: whoever uses those slots next does so in a later step.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.ledger import PageLedger
from weft.memory.allocator import PageAllocator, num_pages_for, slots_of
from weft.memory.pins import Pins
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, Inserted, PrefixCache
from weft.memory.rows import RowTable
from weft.plan.step import TableWrites
from weft.scheduler.request import NO_ROW, Columns, Request

EMPTIED = "the cache was emptied"  # why a hold was lost


class KvMemory:
    def __init__(
        self, rows: RowTable, allocator: PageAllocator, cache: PrefixCache, columns: Columns
    ) -> None:
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.columns = columns
        self.pins = Pins(cache)
        self.ledger = PageLedger(allocator.num_pages)
        self.page_size = allocator.page_size

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds, without pages that are out of circulation."""
        return (self.allocator.num_pages - len(self.allocator.quarantined)) * self.page_size

    @property
    def available(self) -> int:
        """Tokens that could be allocated now: free, or cached and evictable, or held for who gives way."""
        cache = self.cache
        return (
            self.allocator.num_free + cache.evictable_pages + cache.pinned_pages
        ) * self.page_size

    def ceil(self, num_tokens: int) -> int:
        """Tokens that the pages for `num_tokens` hold."""
        return num_pages_for(num_tokens, self.page_size) * self.page_size

    # A waiting request

    def match(self, request: Request) -> None:
        """Find the cached prefix of a waiting request."""
        found = self.cache.match(
            request.namespace, request.packed[: request.reusable_len * TOKEN_BYTES]
        )
        request.handle, request.prefix_pages = found.handle, found.pages
        request.cached_len = request.kv_len = found.length

    def lock(self, request: Request) -> None:
        """Keep the matched prefix from eviction."""
        self.cache.lock(request.handle)
        request.is_locked = True

    def unlock(self, request: Request) -> None:
        if request.is_locked:
            self.cache.unlock(request.handle)
            request.is_locked = False

    # A request with a row

    def take_row(self, request: Request) -> None:
        """Give a locked request a row that begins with its cached prefix."""
        request.row = self.rows.alloc()
        self.columns.fill(request)
        if request.cached_len:
            self.rows.point(request.row, 0, slots_of(request.prefix_pages, self.page_size))
        request.prefix_pages = NO_PAGES

    def extend(self, request: Request) -> IntArray:
        """Allocate the slots [extend_len] of the tokens that the planned step computes.

        A prefill starts on a page border: cached prefixes and all chunks but the last are whole pages.
        """
        assert request.kv_len % self.page_size == 0
        pages = self._alloc(num_pages_for(request.extend_len, self.page_size))
        self.ledger.record(pages, request.id)
        slots = slots_of(pages, self.page_size)[: request.extend_len]
        self.rows.slots[request.row, request.kv_len : request.extend_end] = slots
        return slots

    def decode_tokens(self, rows: IntArray) -> int:
        """Tokens that the next decode step of `rows` computes."""
        return int((self.columns.seq_len[rows] - self.columns.kv_len[rows]).sum())

    def decode_pages(self, rows: IntArray) -> int:
        """New pages that the next decode step of `rows` takes: one for each of its tokens that begins a page."""
        ends, starts = self.columns.seq_len[rows], self.columns.kv_len[rows]
        return int((-(-ends // self.page_size) + -starts // self.page_size).sum())

    def extend_running(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Allocate the slots [T] of T tokens of decoding rows: token i stands at `positions[i]` of `rows[i]`, the
        tokens of a row side by side and behind those that have slots."""
        in_page = positions % self.page_size
        first, slots = positions - in_page, self.rows.slots
        begins_page = in_page == 0
        pages = self._alloc(int(np.count_nonzero(begins_page)))
        self.ledger.record(pages, self.columns.ids[rows[begins_page]])
        slots[rows[begins_page], first[begins_page]] = pages * self.page_size
        taken: IntArray = slots[rows, first] + in_page
        slots[rows, positions] = taken
        return taken

    def num_computed(self, request: Request) -> int:
        """Tokens of a row that have K and V, or are given them by a launched step."""
        return int(self.columns.kv_len[request.row])

    @property
    def num_owned(self) -> int:
        """Pages that requests hold besides the cache's, counted in their rows. Cost: a few microseconds."""
        num_tokens = self.columns.kv_len - self.columns.cached_len
        if self.page_size > 1:
            num_tokens += self.page_size - 1  # a page that is begun counts
            num_tokens //= self.page_size
        return int(np.add.reduce(num_tokens))

    @property
    def imbalance(self) -> int:
        """Pages that are counted too often, or, below 0, not at all: free + quarantined + cached + held - all."""
        allocator, cache = self.allocator, self.cache
        cached = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
        return (
            allocator.num_free
            + len(allocator.quarantined)
            + cached
            + self.num_owned
            - allocator.num_pages
        )

    def share(self, request: Request) -> None:
        """Put the computed tokens of a row into the cache, as far as they fill pages, and go on holding them there
        (SGLang: cache_unfinished_req).

            0 ....... cached_len ....... present ....... length
            | locked already | computed twice | new in the tree |

        What another request has put there meanwhile is used instead of the row's own pages, which are freed.
        """
        before = request.cached_len
        inserted = self._insert(request)
        if inserted.present > before:
            theirs = self.cache.pages_of(inserted.handle)
            theirs = theirs[before // self.page_size : inserted.present // self.page_size]
            self.rows.point(request.row, before, slots_of(theirs, self.page_size))
        self.cache.lock(inserted.handle)
        self.unlock(request)
        request.handle = inserted.handle
        request.is_locked = True
        self._set_cached_len(request, inserted.length)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Take row and pages from a request (SGLang: cache_finished_req). With `keep`, what it computed stays in the
        cache, unlocked. Without, it is dropped, also what was shared before it was known to be worth nothing, as far as
        nobody else uses it."""
        if keep:
            self._set_cached_len(request, self._insert(request).length)
        self.allocator.free(self.owned_pages(request))
        self.unlock(request)
        if not keep:
            self.allocator.free(self.cache.forget(request.handle))
        self.columns.clear(request.row)
        self.rows.free(request.row)
        request.row, request.handle = NO_ROW, None
        request.kv_len = request.cached_len = 0

    def owned_pages(self, request: Request) -> IntArray:
        """Pages that a request with a row holds besides the cache's."""
        return self._pages(request.row, request.cached_len, self.num_computed(request))

    def reset_cache(self) -> None:
        """Empty the prefix cache. Nothing may be locked; what is held gives way."""
        self.pins.lose_all(EMPTIED)
        self.allocator.free(self.cache.reset())

    def reset(self) -> None:
        """Nobody has a row or a page any more, and nothing is cached. Reads nothing that a fault may have spoilt; the
        caller has taken the tokens of those that had rows (`known_tokens`), and forgets what they held."""
        self.pins.forget_all(EMPTIED)
        self.cache.drop()
        self.rows.reset()
        self.columns.reset()
        self.allocator.reset()

    def known_tokens(self, request: Request) -> bytes:
        """The tokens of a request whose ids are known, packed."""
        row = request.row
        if row == NO_ROW or self.columns.requests[row] is not request:
            return request.packed  # it has no row, or has not entered it yet, or has just left it
        return self.columns.packed(row, int(self.columns.known_len[row]))

    def take_writes(self) -> TableWrites | None:
        """What the next plan has to tell the runner about rows."""
        writes = self.rows.take_writes()
        if not writes:
            return None
        rows, starts, slots = zip(*writes, strict=True)
        return TableWrites(
            rows=np.array(rows, dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            lens=np.array([len(s) for s in slots], dtype=np.int32),
            slots=np.concatenate(slots),
        )

    def _insert(self, request: Request) -> Inserted:
        """Offer the computed tokens whose ids are known to the cache; free the row's duplicates of what it has."""
        if not request.shares_kv:
            return Inserted(request.handle, request.cached_len, request.cached_len)
        page_size, row, before = self.page_size, request.row, request.cached_len
        num_tokens = (
            min(self.num_computed(request), int(self.columns.known_len[row]))
            // page_size
            * page_size
        )
        pages = self._pages(row, 0, num_tokens)
        inserted = self.cache.insert(request.namespace, self.columns.packed(row, num_tokens), pages)
        if inserted.present > before:
            self.allocator.free(pages[before // page_size : inserted.present // page_size])
        return inserted

    def _set_cached_len(self, request: Request, length: int) -> None:
        """So much of a row belongs to the cache now."""
        request.cached_len = length
        self.columns.cached_len[request.row] = length

    def _pages(self, row: int, start: int, end: int) -> IntArray:
        """The pages of positions start..end of a row; start is on a page border."""
        return self.rows.slots[row, start : end : self.page_size] // self.page_size

    def _alloc(self, num_pages: int) -> IntArray:
        """Allocate pages, evicting what the free ones lack. Admission and decode checks have made sure that it fits."""
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.pins.unpin_for(missing)
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.alloc(num_pages)
