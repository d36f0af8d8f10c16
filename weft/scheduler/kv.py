"""KV memory of requests: finding a cached prefix, taking a row and pages, and leaving computed
tokens to the cache.

`KvMemory` combines rows, allocator and prefix cache, so that the rest of the scheduler does not
deal with pages. Steps run on the device in the order in which they are launched. Therefore pages
may be shared before a launched step has written them, and freed before it has read them: their next
user is a later step. This module knows no queue, policy or plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.memory.accounting.audit import Fault, audit, find_faults
from weft.memory.allocator import PageAllocator, RowTable, Write, num_pages_for, slots_of
from weft.memory.handoff.leases import Leases
from weft.memory.media.borders import border_before
from weft.memory.pins import Pins
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Inserted, PrefixCache
from weft.plan.step import Plan, TableWrites
from weft.scheduler.request import NO_PREFIX, NO_ROW, CachedPrefix, Columns, Request

EMPTIED = "the cache was emptied"  # reason for the loss of a pin
OTHER_WEIGHTS = "the weights were changed"


class KvMemory:
    # A firm pin makes its memory unavailable. Where more than K and V of a prefix must be kept,
    # pins are removed when memory is needed, as those of sessions are.
    pins_firmly = True

    def __init__(
        self, rows: RowTable, allocator: PageAllocator, cache: PrefixCache, columns: Columns
    ) -> None:
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.columns = columns
        self.pins = Pins(cache)
        self.leases = Leases(cache)
        self.page_size = allocator.page_size
        # The tokens of a picture see each other both ways: no prefix ends inside one.
        self.keeps_items_whole = False
        # Whether a step may compute the run of the step before again, whose drafts are not compared
        # yet.
        self.repeats_runs = False

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pool, without its quarantined pages."""
        allocator = self.allocator
        num_pages = allocator.num_pages - len(allocator.quarantined)
        return num_pages * self.page_size

    @property
    def available(self) -> int:
        """Tokens that could be allocated now: free, evictable or pinned (pins are removed)."""
        cache = self.cache
        num_pages = self.allocator.num_free + cache.evictable_pages + cache.pinned_pages
        return num_pages * self.page_size

    # A waiting request

    def match(self, request: Request, most: int | None = None) -> None:
        """Find the cached prefix of a waiting request in its first `most` tokens; None: in all
        tokens that it may reuse."""
        if most is None:
            most = request.reusable_len
        reusable = request.packed[: most * TOKEN_BYTES]
        handle, length, pages = self.cache.match(request.cache_key(reusable))
        request.prefix = CachedPrefix(handle, length, pages, is_locked=False)
        request.kv_len = length
        if self.keeps_items_whole:
            self._leave_items_whole(request)

    def lock(self, request: Request) -> None:
        """Protect the matched prefix from eviction."""
        handle, length, pages, _ = request.prefix
        self.cache.lock(handle)
        request.prefix = CachedPrefix(handle, length, pages, is_locked=True)

    def unlock(self, request: Request) -> None:
        handle, length, pages, is_locked = request.prefix
        if is_locked:
            self.cache.unlock(handle)
            request.prefix = CachedPrefix(handle, length, pages, is_locked=False)

    # A request with a row

    def take_row(self, request: Request) -> None:
        """Give a locked request a row that begins with its cached prefix."""
        request.row = self.rows.alloc()
        self.columns.fill(request)
        handle, length, pages, is_locked = request.prefix
        if length:
            self.rows.point(request.row, 0, pages)
            self.cache.count_hit(handle)
            # The row has the slots now, so the pages need not be kept here, too.
            request.prefix = CachedPrefix(handle, length, NO_PAGES, is_locked)

    def extend(self, request: Request) -> IntArray:
        """Allocate the slots [extend_len] of the tokens that the planned step computes.

        A prefill starts on a page border, because cached prefixes and all chunks but the last
        consist of whole pages.
        """
        page_size = self.page_size
        start = request.kv_len
        extend_len = request.extend_end - start
        assert start % page_size == 0
        pages = self._alloc(num_pages_for(extend_len, page_size), request.id)
        begin = start // page_size
        self.rows.pages[request.row, begin : begin + len(pages)] = pages
        return slots_of(pages, page_size)[:extend_len]

    def slots_again(self, request: Request, start: int) -> IntArray:
        """The slots of the planned tokens from `start` on, which an earlier step has allocated: the
        next step writes more layers of them."""
        return self.rows.slots_of(request.row, start, request.extend_end)

    def withdraw(self, request: Request, start: int) -> None:
        """Free the pages of the tokens from `start` on, a page border: only some of their layers
        were computed, and the rest will not be."""
        pages = self.rows.pages_of(request.row, start, request.kv_len)
        self.allocator.free(pages)
        request.kv_len = start
        self.columns.kv_len[request.row] = start

    def decode_tokens(self, rows: IntArray) -> int:
        """Tokens that the next decode step of `rows` computes. A run whose drafts are not compared
        yet counts again."""
        columns = self.columns
        starts = columns.kv_len[rows]
        if self.repeats_runs:
            starts = np.minimum(starts, columns.known_len[rows])
        num_tokens = columns.seq_len[rows] - starts
        return int(num_tokens.sum())

    def decode_pages(self, rows: IntArray) -> int:
        """Pages that the next decode step of `rows` allocates: one for each token that begins a
        page.

        page size 4, row with kv_len 6 and seq_len 9:   0 1 2 3 | 4 5 . . | .
                                      ceil(9/4) - ceil(6/4) = 3 - 2 = 1 page for token 8
        """
        page_size = self.page_size
        ends = self.columns.seq_len.take(rows)
        starts = self.columns.kv_len.take(rows)
        # -(-n // size) is n / size rounded up; so this subtracts the pages that the rows have.
        num_pages = -(-ends // page_size)
        num_pages += -starts // page_size
        return int(num_pages.sum())

    def decode_fits(self, rows: IntArray) -> bool:
        """Whether there is memory for the next decode step of `rows`."""
        available = self.available
        # Usually there is memory even if each token began a page, and that count takes half the
        # time.
        num_tokens = (self.columns.seq_len - self.columns.kv_len).take(rows)
        if int(num_tokens.sum()) * self.page_size <= available:
            return True
        return self.decode_pages(rows) * self.page_size <= available

    def extend_running(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Allocate the slots [T] of T tokens of decoding rows.

        Token i is at `positions[i]` of `rows[i]`; the tokens of a row are consecutive and follow
        those that have slots. A token that begins a page takes a new page; every other token uses
        the row's last page.
        """
        page_size = self.page_size
        num_before = positions // page_size  # pages of the row that are full
        # Positions are not negative: this is `%`, in a third of the time.
        in_page = positions - num_before * page_size
        begins_page = in_page == 0
        table = self.rows.pages.reshape(-1)
        places = rows.astype(np.intp) * self.rows.max_pages + num_before
        # New pages first: other tokens may be on a page that begins in this call.
        if np.count_nonzero(begins_page):
            new_rows = rows[begins_page]
            pages = self._alloc(len(new_rows), self.columns.ids[new_rows])
            table[places[begins_page]] = pages
        slots: IntArray = table.take(places) * page_size + in_page
        return slots

    def cut(self, row: int, kv_len: int) -> None:
        """Keep the first `kv_len` computed tokens of a row and free the pages after them. Later
        tokens on the last page will be overwritten."""
        begin = num_pages_for(kv_len, self.page_size) * self.page_size
        end = int(self.columns.kv_len[row])
        if begin < end:
            self.allocator.free(self.rows.pages_of(row, begin, end))
        self.columns.kv_len[row] = kv_len

    def share(self, request: Request) -> None:
        """Put the full pages of computed tokens of a row into the cache, and keep them locked there
        (SGLang: cache_unfinished_req).

            0 ........ cached_len ........ present ........ length
            | locked already | computed twice | new in the tree |

        Tokens that another request has inserted in the meantime are used from there; the row's own
        pages for them are freed.
        """
        page_size = self.page_size
        before = request.prefix.length
        inserted = self._insert(request)
        present = inserted.present
        if present > before:
            pages = self.cache.pages_of(inserted.handle)
            theirs = pages[before // page_size : present // page_size]
            self.rows.point(request.row, before, theirs)
        # Lock the new path first: the old path is part of it and must not become evictable in
        # between.
        self.cache.lock(inserted.handle)
        self.unlock(request)
        request.prefix = CachedPrefix(inserted.handle, inserted.length, NO_PAGES, is_locked=True)
        self.columns.cached_len[request.row] = inserted.length

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Free the row and the pages of a request (SGLang: cache_finished_req).

        With `keep`, its computed tokens stay in the cache, unlocked. Without, they are dropped
        unless another request uses them, including those that were shared before they were known to
        be invalid.
        """
        if keep:
            inserted = self._insert(request)
            # The lock is still on the old handle; until it is released, only the new length counts.
            handle, _, pages, is_locked = request.prefix
            request.prefix = CachedPrefix(handle, inserted.length, pages, is_locked)
            self.columns.cached_len[request.row] = inserted.length
        self.allocator.free(self.owned_pages(request))
        self.unlock(request)
        if not keep:
            self.allocator.free(self.cache.forget(request.prefix.handle))
        self.columns.clear(request.row)
        self.rows.free(request.row)
        request.row = NO_ROW
        request.prefix = NO_PREFIX
        request.kv_len = 0

    def forget_prefix(self, key: CacheKey, keep: int) -> int:
        """Drop every sequence that begins with `key` from the cache, except pages in use and the
        first `keep` tokens. Returns the number of dropped tokens."""
        kept = self.cache.match(CacheKey(key.namespace, key.tokens[: keep * TOKEN_BYTES]))
        self.cache.lock(kept.handle)
        pages = self.cache.forget_prefix(key)
        self.cache.unlock(kept.handle)
        self.allocator.free(pages)
        return len(pages) * self.page_size

    def forget_written(self, slots: IntArray) -> None:
        """Drop the nodes with these slots from the cache, unless they are in use."""
        self.allocator.free(self.cache.forget_pages(slots // self.page_size))

    def reset_cache(self) -> None:
        """Empty the prefix cache. No request may have a lock in it; pins and leases are lost."""
        self.pins.lose_all(EMPTIED)
        self.leases.end_all(EMPTIED)
        self.allocator.free(self.cache.reset())

    def reset(self) -> None:
        """Free all rows and pages, and empty the cache. Reads no state that a fault may have
        damaged.

        The caller has saved the tokens of the requests with rows (`known_tokens`), and calls
        `forget_kv` for these requests.
        """
        self.pins.forget_all(EMPTIED)
        self.leases.forget_all(EMPTIED)
        self.cache.drop()
        self.rows.reset()
        self.columns.reset()
        self.allocator.reset()

    def weights_changed(self) -> None:
        """All KV until now, wherever it is, was computed with other weights than later KV."""
        self.leases.lender.renew(OTHER_WEIGHTS)

    def weights_reloaded(self) -> None:
        """The weights are again those of the checkpoint, and nothing is cached."""
        self.leases.lender.renew(OTHER_WEIGHTS)

    def known_tokens(self, request: Request) -> bytes:
        """The tokens of a request whose ids are known, packed."""
        row = request.row
        if row == NO_ROW or self.columns.requests[row] is not request:
            return request.packed  # it has no row, or is just entering or leaving it
        return self.columns.packed(row, int(self.columns.known_len[row]))

    def take_writes(self) -> TableWrites | None:
        """The changes of the row table for the next plan."""
        if not self.rows.writes:
            return None
        return table_writes(self.rows.take_writes())

    def with_groups(self, plan: Plan) -> Plan:
        """The plan with the slots of layers that have memory of their own.

        Called once for each plan, after all its memory has been allocated.
        """
        return plan

    # When memory runs out

    def reclaim(self) -> bool:
        """Ask for memory back that neither requests nor the prefix cache use. Returns whether some
        will come back later."""
        self.leases.end_all("its memory was needed")
        return False

    def lacking(self, rows: IntArray, num_ahead: int) -> int:
        """Tokens of memory that are missing for the next decode step of `rows`, and for `num_ahead`
        tokens of each row."""
        needed = max(self.decode_pages(rows) * self.page_size, len(rows) * num_ahead)
        return needed - self.available

    def freed_tokens(self, request: Request) -> int:
        """Tokens of memory that become available if this request is retracted."""
        num_computed = int(self.columns.kv_len[request.row])
        own = num_pages_for(num_computed - request.prefix.length, self.page_size)
        # Nodes that it shares with other requests stay locked by them.
        unshared = self.cache.unshared_pages(request.prefix.handle)
        return (own + unshared) * self.page_size

    # Accounting

    def usage(self) -> dict[str, int]:
        """The fields of `Stats` about memory that requests own, or lock in the cache."""
        return {"kv_used": self.capacity - self.available}

    def audit(self, requests: Mapping[str, Request]) -> None:
        """Check the owner of every page. `requests` are those with a row, by name. Raises
        AccountingError."""
        audit(self.allocator, self.cache, self._owned_by(requests))
        assert not self.imbalance, f"the sum of all pages is off by {self.imbalance}"

    def find_faults(self, requests: Mapping[str, Request]) -> list[Fault]:
        """The pages that do not have exactly one owner. Raises AccountingError for a page outside
        of the pool."""
        return find_faults(self.allocator, self.cache, self._owned_by(requests))

    def quarantine(self, faults: Sequence[Fault]) -> None:
        """Take the faulty pages out of use, now or when their owners free them."""
        for fault in faults:
            self.allocator.quarantine(fault.page, is_owned=fault.is_owned)

    def last_owner(self, fault: Fault) -> int:
        """The id of the request that owned the page last, or NOBODY."""
        return int(self.allocator.last_owner[fault.page])

    def owned_pages(self, request: Request) -> IntArray:
        """Pages that a request with a row owns, without those of the cache."""
        num_computed = int(self.columns.kv_len[request.row])
        return self.rows.pages_of(request.row, request.prefix.length, num_computed)

    @property
    def num_owned(self) -> int:
        """Pages that requests own, without those of the cache, computed from their rows. Takes a
        few microseconds."""
        num_tokens = self.columns.kv_len - self.columns.cached_len
        if self.page_size > 1:
            num_tokens += self.page_size - 1  # a partly filled page counts
            num_tokens //= self.page_size
        return int(np.add.reduce(num_tokens))

    @property
    def imbalance(self) -> int:
        """free + quarantined + cached + owned - all: pages that are counted twice, or, if negative,
        not at all."""
        allocator = self.allocator
        cache = self.cache
        cached = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
        not_free = len(allocator.quarantined) + cached + self.num_owned
        return allocator.num_free + not_free - allocator.num_pages

    # Inside

    def _leave_items_whole(self, request: Request) -> None:
        """Shorten the matched prefix of a request so that it ends inside none of its items."""
        whole_len = border_before(request.kv_len, request.message.spans, self.page_size)
        if whole_len < request.kv_len:
            self.match(request, whole_len)

    def _owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        """The pages that each of the requests owns by itself."""
        return {name: self.owned_pages(request) for name, request in requests.items()}

    def _insert(self, request: Request) -> Inserted:
        """Insert the computed tokens with known ids into the cache; free the row's duplicates."""
        before = request.prefix.length
        if not request.message.shares_kv:
            return Inserted(request.prefix.handle, before, before)
        row = request.row
        page_size = self.page_size
        columns = self.columns
        # A launched step computes one token whose id is not known yet, so no key can include it.
        num_tokens = min(int(columns.kv_len[row]), int(columns.known_len[row]))
        num_tokens -= num_tokens % page_size
        pages = self.rows.pages_of(row, 0, num_tokens)
        key = request.cache_key(columns.packed(row, num_tokens))
        inserted = self.cache.insert(key, pages)
        present = inserted.present
        if present > before:
            # Another request has inserted the same tokens in the meantime: its pages are used.
            self.allocator.free(pages[before // page_size : present // page_size])
        return inserted

    def _alloc(self, num_pages: int, owners: int | LongArray) -> IntArray:
        """Allocate pages for requests (`owners`: their ids), and evict cached pages if too few are
        free.

        The checks at admission and before decoding have made sure that there are enough.
        """
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.pins.unpin_for(missing)
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.alloc(num_pages, owners)


def table_writes(writes: Sequence[Write]) -> TableWrites:
    """Changes of a table of slots, as a plan says them."""
    rows: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    slots: list[IntArray] = []
    for row, start, pointed in writes:
        rows.append(row)
        starts.append(start)
        lens.append(len(pointed))
        slots.append(pointed)
    return TableWrites(
        rows=np.array(rows, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        lens=np.array(lens, dtype=np.int32),
        slots=np.concatenate(slots),
    )
