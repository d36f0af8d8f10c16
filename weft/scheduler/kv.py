"""What a request does with KV memory: find its prefix, take a row and pages, leave what it computed
to the cache.

It puts rows, allocator and prefix cache together, so that the rest of the scheduler says what
happens and not how pages move. Steps run on the device in the order in which they are launched.
Therefore what a launched step will write may be shared, and what it will read may be freed, before
it has run: the next user of those slots is a later step. It knows no queue, policy or plan.
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

EMPTIED = "the cache was emptied"  # why a pin was lost
OTHER_WEIGHTS = "the weights were changed"


class KvMemory:
    # A firm pin takes its memory out of what is available. Where more than K and V of a prefix must
    # be kept, pins give way as those of sessions do.
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
        # A step may compute the run of the one before once more, whose drafts are not compared.
        self.repeats_runs = False

    @property
    def capacity(self) -> int:
        """Tokens that the pool has room for, without pages that are out of circulation."""
        allocator = self.allocator
        num_pages = allocator.num_pages - len(allocator.quarantined)
        return num_pages * self.page_size

    @property
    def available(self) -> int:
        """Tokens that could be allocated now: free, evictable, or pinned (pins give way)."""
        cache = self.cache
        num_pages = self.allocator.num_free + cache.evictable_pages + cache.pinned_pages
        return num_pages * self.page_size

    # A waiting request

    def match(self, request: Request, most: int | None = None) -> None:
        """Find the cached prefix of a waiting request, in its first `most` tokens; None: in all
        that it may reuse."""
        if most is None:
            most = request.reusable_len
        reusable = request.packed[: most * TOKEN_BYTES]
        handle, length, pages = self.cache.match(request.cache_key(reusable))
        request.prefix = CachedPrefix(handle, length, pages, is_locked=False)
        request.kv_len = length
        if self.keeps_items_whole:
            self._leave_items_whole(request)

    def lock(self, request: Request) -> None:
        """Keep the matched prefix from eviction."""
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
            # From here on the row has the slots; the pages would only be kept twice.
            request.prefix = CachedPrefix(handle, length, NO_PAGES, is_locked)

    def extend(self, request: Request) -> IntArray:
        """Allocate the slots [extend_len] of the tokens that the planned step computes.

        A prefill starts on a page border: cached prefixes and all chunks but the last are whole
        pages.
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
        """The slots of the planned tokens from `start` on, which a step before has allocated: the
        next one writes more of their layers."""
        return self.rows.slots_of(request.row, start, request.extend_end)

    def withdraw(self, request: Request, start: int) -> None:
        """Free the pages of the tokens from `start` on, a border of pages: they were computed in
        part and will never be whole."""
        pages = self.rows.pages_of(request.row, start, request.kv_len)
        self.allocator.free(pages)
        request.kv_len = start
        self.columns.kv_len[request.row] = start

    def decode_tokens(self, rows: IntArray) -> int:
        """Tokens that the next decode step of `rows` computes, those of a run whose drafts are not
        compared once more."""
        columns = self.columns
        starts = columns.kv_len[rows]
        if self.repeats_runs:
            starts = np.minimum(starts, columns.known_len[rows])
        num_tokens = columns.seq_len[rows] - starts
        return int(num_tokens.sum())

    def decode_pages(self, rows: IntArray) -> int:
        """New pages that the next decode step of `rows` takes: for each token that begins one.

        page size 4, row with kv_len 6 and seq_len 9:   0 1 2 3 | 4 5 . . | .
                                      ceil(9/4) - ceil(6/4) = 3 - 2 = 1 page for token 8
        """
        page_size = self.page_size
        ends = self.columns.seq_len.take(rows)
        starts = self.columns.kv_len.take(rows)
        # -(-n // size) is n / size rounded up; so this is minus the pages that there are.
        num_pages = -(-ends // page_size)
        num_pages += -starts // page_size
        return int(num_pages.sum())

    def decode_fits(self, rows: IntArray) -> bool:
        """Whether there is memory for the next decode step of `rows`."""
        available = self.available
        # As a rule there is, even if each token began a page: that is counted in half the time.
        num_tokens = (self.columns.seq_len - self.columns.kv_len).take(rows)
        if int(num_tokens.sum()) * self.page_size <= available:
            return True
        return self.decode_pages(rows) * self.page_size <= available

    def extend_running(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Allocate the slots [T] of T tokens of decoding rows.

        Token i stands at `positions[i]` of `rows[i]`; the tokens of a row follow each other, and
        those that have slots. A token that begins a page takes a new one; every other token finds
        its page in the row.
        """
        page_size = self.page_size
        num_before = positions // page_size  # pages of the row that are full
        # Positions are not negative: this is `%`, in a third of the time.
        in_page = positions - num_before * page_size
        begins_page = in_page == 0
        table = self.rows.pages.reshape(-1)
        places = rows.astype(np.intp) * self.rows.max_pages + num_before
        # Pages first: every other token finds its page in the row, also one that begins here.
        if np.count_nonzero(begins_page):
            new_rows = rows[begins_page]
            pages = self._alloc(len(new_rows), self.columns.ids[new_rows])
            table[places[begins_page]] = pages
        slots: IntArray = table.take(places) * page_size + in_page
        return slots

    def cut(self, row: int, kv_len: int) -> None:
        """Keep what is computed of the first `kv_len` tokens of a row; take back the pages behind
        them. What stands behind them on the last page is written over."""
        begin = num_pages_for(kv_len, self.page_size) * self.page_size
        end = int(self.columns.kv_len[row])
        if begin < end:
            self.allocator.free(self.rows.pages_of(row, begin, end))
        self.columns.kv_len[row] = kv_len

    def share(self, request: Request) -> None:
        """Put the computed tokens of a row into the cache, as far as they fill pages, and keep
        them locked there (SGLang: cache_unfinished_req).

            0 ........ cached_len ........ present ........ length
            | locked already | computed twice | new in the tree |

        What another request has put there meanwhile is used instead of the row's own pages, which
        are freed.
        """
        page_size = self.page_size
        before = request.prefix.length
        inserted = self._insert(request)
        present = inserted.present
        if present > before:
            pages = self.cache.pages_of(inserted.handle)
            theirs = pages[before // page_size : present // page_size]
            self.rows.point(request.row, before, theirs)
        # The new path first: it has the old one in it, which must not become evictable between.
        self.cache.lock(inserted.handle)
        self.unlock(request)
        request.prefix = CachedPrefix(inserted.handle, inserted.length, NO_PAGES, is_locked=True)
        self.columns.cached_len[request.row] = inserted.length

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Take row and pages from a request (SGLang: cache_finished_req).

        With `keep`, what it computed stays in the cache, unlocked. Without, it is dropped as far
        as no other request uses it: also what was shared before it was known to be worthless.
        """
        if keep:
            inserted = self._insert(request)
            # Its lock is still on the old handle: the new length alone counts until it is freed.
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
        """Drop from the cache every sequence that begins with `key`, but for what is in use and the
        first `keep` tokens. Returns how many tokens those were."""
        kept = self.cache.match(CacheKey(key.namespace, key.tokens[: keep * TOKEN_BYTES]))
        self.cache.lock(kept.handle)
        pages = self.cache.forget_prefix(key)
        self.cache.unlock(kept.handle)
        self.allocator.free(pages)
        return len(pages) * self.page_size

    def forget_written(self, slots: IntArray) -> None:
        """Drop from the cache what holds these slots, as far as nobody uses it."""
        self.allocator.free(self.cache.forget_pages(slots // self.page_size))

    def reset_cache(self) -> None:
        """Empty the prefix cache. No request may have locked any of it; pins and leases are
        lost."""
        self.pins.lose_all(EMPTIED)
        self.leases.end_all(EMPTIED)
        self.allocator.free(self.cache.reset())

    def reset(self) -> None:
        """Take all rows and pages back, and cache nothing. Reads nothing that a fault may have
        spoilt.

        The caller has taken the tokens of the requests that had rows (`known_tokens`), and makes
        them forget what they owned.
        """
        self.pins.forget_all(EMPTIED)
        self.leases.forget_all(EMPTIED)
        self.cache.drop()
        self.rows.reset()
        self.columns.reset()
        self.allocator.reset()

    def weights_changed(self) -> None:
        """What was computed until now, wherever it is, is of other weights than what will be."""
        self.leases.lender.renew(OTHER_WEIGHTS)

    def weights_reloaded(self) -> None:
        """The weights are those of the checkpoint again, and nothing is cached."""
        self.leases.lender.renew(OTHER_WEIGHTS)

    def known_tokens(self, request: Request) -> bytes:
        """The tokens of a request whose ids are known, packed."""
        row = request.row
        if row == NO_ROW or self.columns.requests[row] is not request:
            return request.packed  # it has no row, or has not entered it yet, or has just left it
        return self.columns.packed(row, int(self.columns.known_len[row]))

    def take_writes(self) -> TableWrites | None:
        """The changes of rows that the next plan takes to the runner."""
        if not self.rows.writes:
            return None
        return table_writes(self.rows.take_writes())

    def with_groups(self, plan: Plan) -> Plan:
        """A plan with what it has to say of layers whose memory is apart from that of all others.

        Called once for each plan, behind all that takes memory for it.
        """
        return plan

    # When memory runs out

    def reclaim(self) -> bool:
        """Let memory come back that is lent to neither requests nor the prefix cache. Returns
        whether some is still to come."""
        self.leases.end_all("its memory was needed")
        return False

    def lacking(self, rows: IntArray, num_ahead: int) -> int:
        """Tokens that are missing for the next decode step of `rows`, and for `num_ahead` tokens of
        each."""
        needed = max(self.decode_pages(rows) * self.page_size, len(rows) * num_ahead)
        return needed - self.available

    def freed_tokens(self, request: Request) -> int:
        """Tokens of memory that become available if this request is retracted."""
        num_computed = int(self.columns.kv_len[request.row])
        own = num_pages_for(num_computed - request.prefix.length, self.page_size)
        # What it shares with others stays locked by them.
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
        """The pages that have not exactly one owner. Raises AccountingError for a page outside of
        the pool."""
        return find_faults(self.allocator, self.cache, self._owned_by(requests))

    def quarantine(self, faults: Sequence[Fault]) -> None:
        """Take the pages of faults out of circulation, now or when their owners return them."""
        for fault in faults:
            self.allocator.quarantine(fault.page, is_owned=fault.is_owned)

    def last_owner(self, fault: Fault) -> int:
        """The id of the request that the page was given to last, or NOBODY."""
        return int(self.allocator.last_owner[fault.page])

    def owned_pages(self, request: Request) -> IntArray:
        """Pages that a request with a row owns besides the cache's."""
        num_computed = int(self.columns.kv_len[request.row])
        return self.rows.pages_of(request.row, request.prefix.length, num_computed)

    @property
    def num_owned(self) -> int:
        """Pages that requests own besides the cache's, counted in their rows. Cost: a few
        microseconds."""
        num_tokens = self.columns.kv_len - self.columns.cached_len
        if self.page_size > 1:
            num_tokens += self.page_size - 1  # a page that is begun counts
            num_tokens //= self.page_size
        return int(np.add.reduce(num_tokens))

    @property
    def imbalance(self) -> int:
        """free + quarantined + cached + owned - all: pages counted twice, or, below 0, not at
        all."""
        allocator = self.allocator
        cache = self.cache
        cached = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
        not_free = len(allocator.quarantined) + cached + self.num_owned
        return allocator.num_free + not_free - allocator.num_pages

    # Inside

    def _leave_items_whole(self, request: Request) -> None:
        """Let the prefix that was found of a request end inside none of its items."""
        whole_len = border_before(request.kv_len, request.message.spans, self.page_size)
        if whole_len < request.kv_len:
            self.match(request, whole_len)

    def _owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        """The pages that each of the requests owns by itself."""
        return {name: self.owned_pages(request) for name, request in requests.items()}

    def _insert(self, request: Request) -> Inserted:
        """Offer the computed tokens whose ids are known to the cache; free the row's duplicates."""
        before = request.prefix.length
        if not request.message.shares_kv:
            return Inserted(request.prefix.handle, before, before)
        row = request.row
        page_size = self.page_size
        columns = self.columns
        # A launched step computes one token whose id is not known yet: no key can have it.
        num_tokens = min(int(columns.kv_len[row]), int(columns.known_len[row]))
        num_tokens -= num_tokens % page_size
        pages = self.rows.pages_of(row, 0, num_tokens)
        key = request.cache_key(columns.packed(row, num_tokens))
        inserted = self.cache.insert(key, pages)
        present = inserted.present
        if present > before:
            # Another request has put the same tokens there meanwhile: its pages are used.
            self.allocator.free(pages[before // page_size : present // page_size])
        return inserted

    def _alloc(self, num_pages: int, owners: int | LongArray) -> IntArray:
        """Allocate pages for requests, by their ids, evicting what the free ones lack.

        Admission and decode checks have made sure that it fits.
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
