"""KV memory of requests: finding a cached prefix, taking a row and pages, and leaving computed
tokens to the cache.

`KvMemory` combines rows, allocator and prefix cache, so that the rest of the scheduler does not
deal with pages. Layers with memory of their own are its `groups` (`groups/protocol.py`); whoever
uses pages without a request is one of its `holders`.

Steps run on the device in the order in which they are launched. Therefore pages may be shared
before a launched step has written them, and freed before it has read them: their next user is a
later step. This module knows no queue, policy or plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.memory.accounting.holders import Holder
from weft.memory.accounting.part_pages import EndPage, PartPage, PartPages
from weft.memory.accounting.pins import Pins
from weft.memory.allocator import (
    OutOfPages,
    PageAllocator,
    RowTable,
    joined,
    num_pages_for,
    slots_of,
)
from weft.memory.handoff.leases import Leases
from weft.memory.media.borders import border_before
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle, Inserted
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import pages_of
from weft.memory.tiers.resume_states import NoResumeStates, ResumeStates
from weft.plan.step import Plan, SlotCopies, TableWrites
from weft.scheduler.accounts import KvAccounts, KvRoom
from weft.scheduler.groups.protocol import KvGroup
from weft.scheduler.request import NO_PREFIX, NO_ROW, CachedPrefix, Columns, Request

NO_RESUME_STATES = NoResumeStates()  # of all models in which every page can be resumed
EMPTIED = "the cache was emptied"  # reason for the loss of a pin
OTHER_WEIGHTS = "the weights were changed"


Landing = Callable[[IntArray], None]


class KvPrefixes:
    """The cached prefixes of waiting requests: found, and locked when a request is picked.
    `keeps_items_unsplit`: the tokens of a picture see each other both ways, so that no prefix ends
    inside one."""

    def __init__(
        self,
        cache: RadixCache,
        groups: Sequence[KvGroup],
        page_size: int,
        *,
        keeps_items_unsplit: bool,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._page_size = page_size
        self._keeps_items_unsplit = keeps_items_unsplit
        # Whether a cached prefix can be resumed after each of its pages.
        self.resumes_everywhere = all(group.resumes_everywhere for group in groups)
        # The request of the last call of `match`, and how many of its tokens are cached, even if
        # some group cannot resume after them.
        self._found_id = -1
        self._found_len = 0

    def forget(self) -> None:
        """All memory was freed."""
        self._found_id = -1

    def match(self, request: Request, most: int | None = None) -> None:
        """Find the cached prefix of a waiting request in its first `most` tokens, up to where all
        groups can resume it; None: in all tokens that it may reuse."""
        if most is None:
            most = request.reusable_len
        reusable = request.packed[: most * TOKEN_BYTES]
        handle, length, pages = self._cache.match(request.cache_key(reusable))
        self._found_id = request.id
        self._found_len = length
        if self._groups and handle is not None:
            node, length = self._resumable(handle, length)
            if node is not handle:
                handle = node
                pages = pages_of(node)
        request.prefix = CachedPrefix(handle, length, pages, is_locked=False)
        request.kv_len = length
        if self._keeps_items_unsplit:
            self._leave_items_unsplit(request)

    def lock(self, request: Request) -> None:
        """Protect the matched prefix from eviction."""
        handle, length, pages, _ = request.prefix
        self._cache.lock(handle)
        request.prefix = CachedPrefix(handle, length, pages, is_locked=True)
        if self._groups:
            found_len = self.matched_len(request)
            for group in self._groups:
                group.lock(request, found_len)

    def matched_len(self, request: Request) -> int:
        """How much of a picked request's prompt is cached, whether or not it can resume there."""
        return self._found_len if self._found_id == request.id else request.prefix.length

    def unlock(self, request: Request) -> None:
        handle, length, pages, is_locked = request.prefix
        if is_locked:
            self._cache.unlock(handle)
            request.prefix = CachedPrefix(handle, length, pages, is_locked=False)
        for group in self._groups:
            group.unlock(request, handle)

    def next_copy(self, request: Request) -> int:
        """The length in tokens at which a picked request will leave the next point where others can
        resume; 0: none. Only if not `resumes_everywhere`."""
        copies = [
            group.next_copy(request) for group in self._groups if not group.resumes_everywhere
        ]
        return max(copies)

    def _resumable(self, handle: Handle, length: int) -> tuple[Handle, int]:
        """The longest part of a cached prefix that every group can resume."""
        num_agreed = 0  # groups in succession that can resume there
        for group in cycle(self._groups):
            node, length = group.resumable(handle, length)
            num_agreed = num_agreed + 1 if node is handle else 1
            handle = node
            if num_agreed == len(self._groups) or handle is None:
                break
        return handle, length

    def _leave_items_unsplit(self, request: Request) -> None:
        """Shorten the matched prefix of a request so that it ends inside none of its items."""
        unsplit_len = border_before(request.kv_len, request.message.spans, self._page_size)
        if unsplit_len < request.kv_len:
            self.match(request, unsplit_len)


class PageCopies:
    """What requests copy of pages that they share in part (`memory/accounting/part_pages.py`): a
    few tokens after their cached prefixes, in their first steps."""

    def __init__(self, parts: PartPages, rows: RowTable, columns: Columns) -> None:
        self.parts = parts
        self._rows = rows
        self._columns = columns
        self._page_size = rows.page_size
        self._chosen: dict[int, PartPage] = {}  # to be copied by the next step, by row
        self._copies: list[SlotCopies] = []  # of the next plan

    def choose(self, request: Request) -> int:
        """Choose what a request with a new row copies in its first step, and return how many tokens
        that is. At least one token is left to compute."""
        handle, length, _, _ = request.prefix
        most = min(length + self._page_size - 1, request.reusable_len)
        if handle is None or most <= length:
            return 0
        key = request.cache_key(request.packed[: most * TOKEN_BYTES])
        rest = key.tokens[length * TOKEN_BYTES :]
        part = self.parts.find(handle, rest, request.message.tenant)
        if part.num_tokens:
            self._chosen[request.row] = part
        return part.num_tokens

    def begin(self, row: int, start: int, slots: IntArray) -> int:
        """How many of a row's tokens from `start` on, which have these slots, are copied by the
        next step."""
        part = self._chosen.pop(row, None)
        if part is None:
            return 0
        num_tokens = part.num_tokens
        first = part.page * self._page_size
        sources = np.arange(first, first + num_tokens, dtype=np.int32)
        targets = slots[:num_tokens]
        self._copies.append(SlotCopies(sources, targets))
        self._rows.log(row, start, targets)
        return num_tokens

    def take(self) -> SlotCopies | None:
        """The copies of the next plan."""
        copies = self._copies
        if not copies:
            return None
        self._copies = []
        sources = np.concatenate([one.sources for one in copies])
        return SlotCopies(sources, np.concatenate([one.targets for one in copies]))

    def released(self, request: Request, inserted: Inserted | None) -> bool:
        """A request gives up its row; its full pages are in the cache if they were `inserted`.
        Returns whether the page after them is kept, which has known tokens in a part of it."""
        row = request.row
        self._chosen.pop(row, None)
        if inserted is None or inserted.handle is None:
            return False
        if not request.message.shares_kv or not request.spec.service.keeps_prefixes:
            return False
        columns = self._columns
        num_tokens = min(int(columns.kv_len[row]), int(columns.known_len[row]))
        length = inserted.length
        if num_tokens <= length:
            return False
        key = request.cache_key(columns.packed(row, num_tokens))
        page = int(self._rows.pages[row, length // self._page_size])
        end = EndPage(key.tokens[length * TOKEN_BYTES :], page, request.message.tenant)
        self.parts.keep(inserted.handle, end)
        return True

    def reset(self) -> None:
        """All memory was freed."""
        self._chosen.clear()
        self._copies.clear()


class KvMemory:
    """`groups`: layers with memory of their own, which share `pins` and report their
    `resume_states`. `part_pages`: None if requests share full pages alone. For
    `keeps_items_unsplit` see `KvPrefixes`, for `repeats_runs` `KvRoom`."""

    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: RadixCache,
        columns: Columns,
        *,
        pins: Pins | None = None,
        groups: Sequence[KvGroup] = (),
        resume_states: ResumeStates = NO_RESUME_STATES,
        part_pages: PartPages | None = None,
        keeps_items_unsplit: bool = False,
        repeats_runs: bool = False,
    ) -> None:
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.columns = columns
        self.groups = tuple(groups)
        self.pins = pins or Pins(cache)
        self.resume_states = resume_states
        self.leases = Leases(cache, self.resume_states)
        self.copies: PageCopies | None = None
        self.holders: list[Holder] = [self.leases]
        if part_pages is not None:
            self.copies = PageCopies(part_pages, rows, columns)
            self.holders.append(part_pages)
        self.page_size = allocator.page_size
        self.prefixes = KvPrefixes(
            cache, self.groups, self.page_size, keeps_items_unsplit=keeps_items_unsplit
        )
        self.room = KvRoom(
            allocator,
            cache,
            columns,
            self.groups,
            part_pages=part_pages,
            repeats_runs=repeats_runs,
        )
        self.accounts = KvAccounts(
            rows, allocator, cache, columns, groups=self.groups, holders=self.holders
        )
        self._landings: list[Landing] = []

    @property
    def pins_firmly(self) -> bool:
        """Whether a firm pin keeps everything of a prefix."""
        return all(group.pins_firmly for group in self.groups)

    def add_holder(self, holder: Holder) -> None:
        """`holder` uses memory from now on. It is asked before the leases."""
        self.holders.insert(0, holder)

    def on_landing(self, landing: Landing) -> None:
        """Call `landing` with the pages that came from outside of the pool, whenever some are in
        the cache."""
        self._landings.append(landing)

    def landed(self, pages: IntArray) -> None:
        """Pages from outside of the pool are in the cache now."""
        for landing in self._landings:
            landing(pages)

    def alloc(self, num_pages: int, owners: int | LongArray, step: str = "prefill") -> IntArray:
        """Allocate pages for requests (`owners`: their ids), and evict cached pages if too few are
        free.

        The checks at admission and before decoding have made sure that there are enough; else
        raises OutOfPages, and says what the `step` lacks.
        """
        missing = num_pages - self.allocator.num_free
        if missing > 0 and self.copies is not None:
            self.copies.parts.give_up(missing)
            missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.pins.unpin_for(missing)
            if missing > self.cache.evictable_pages:
                raise OutOfPages(self.room.out_of_memory(step, num_pages * self.page_size))
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.alloc(num_pages, owners)

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
        for group in self.groups:
            group.take_row(request)

    def extend(self, request: Request) -> IntArray:
        """Allocate the slots [extend_len] of the tokens that the planned step computes.

        A prefill starts on a page border, because cached prefixes and all chunks but the last
        consist of whole pages.
        """
        page_size = self.page_size
        start = request.kv_len
        extend_len = request.extend_end - start
        assert start % page_size == 0
        pages = self.alloc(num_pages_for(extend_len, page_size), request.id)
        begin = start // page_size
        self.rows.pages[request.row, begin : begin + len(pages)] = pages
        for group in self.groups:
            group.extend(request)
        return slots_of(pages, page_size)[:extend_len]

    def slots_again(self, request: Request, start: int) -> IntArray:
        """The slots of the planned tokens from `start` on, which an earlier step has allocated: the
        next step writes more layers of them."""
        for group in self.groups:
            group.slots_again(request, start)
        return self.rows.slots_of(request.row, start, request.extend_end)

    def withdraw(self, request: Request, start: int) -> None:
        """Free the pages of the tokens from `start` on, a page border: only some of their layers
        were computed, and the rest will not be."""
        for group in self.groups:
            group.withdraw(request, start)
        pages = self.rows.pages_of(request.row, start, request.kv_len)
        self.allocator.free(pages)
        request.kv_len = start
        self.columns.kv_len[request.row] = start

    def extend_running(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Allocate the slots [T] of T tokens of decoding rows.

        Token i is at `positions[i]` of `rows[i]`; the tokens of a row are consecutive and follow
        those that have slots. A token that begins a page takes a new page; every other token uses
        the row's last page.
        """
        if self.groups:
            # A row has one entry for each of its tokens.
            is_first = positions == self.columns.kv_len[rows]
            for group in self.groups:
                group.before_decode(rows[is_first])
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
            pages = self.alloc(len(new_rows), self.columns.ids[new_rows], "decode")
            table[places[begins_page]] = pages
        slots: IntArray = table.take(places) * page_size + in_page
        for group in self.groups:
            group.extend_running(rows, positions)
        return slots

    def cut(self, row: int, kv_len: int) -> None:
        """Keep the first `kv_len` computed tokens of a row and free the pages after them. Later
        tokens on the last page will be overwritten."""
        begin = num_pages_for(kv_len, self.page_size) * self.page_size
        end = int(self.columns.kv_len[row])
        for group in self.groups:
            group.cut(row, kv_len, end)
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
            pages = pages_of(inserted.handle)
            theirs = pages[before // page_size : present // page_size]
            self.rows.point(request.row, before, theirs)
        # Lock the new path first: the old path is part of it and must not become evictable in
        # between.
        self.cache.lock(inserted.handle)
        self.prefixes.unlock(request)
        request.prefix = CachedPrefix(inserted.handle, inserted.length, NO_PAGES, is_locked=True)
        self.columns.cached_len[request.row] = inserted.length
        for group in self.groups:
            group.shared(request)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Free the row and the pages of a request (SGLang: cache_finished_req).

        With `keep`, its computed tokens stay in the cache, unlocked. Without, they are dropped
        unless another request uses them, including those that were shared before they were known to
        be invalid.
        """
        row = request.row
        num_computed = int(self.columns.kv_len[row])
        inserted: Inserted | None = None
        if keep:
            inserted = self._insert(request)
            # The lock is still on the old handle; until it is released, only the new length counts.
            handle, _, pages, is_locked = request.prefix
            request.prefix = CachedPrefix(handle, inserted.length, pages, is_locked)
            self.columns.cached_len[row] = inserted.length
        else:
            self._before_dropping()
        owned = self.accounts.owned_pages(request)
        if self.copies is not None and self.copies.released(request, inserted):
            owned = owned[1:]
        self.allocator.free(owned)
        self.prefixes.unlock(request)
        if inserted is not None and not request.spec.service.keeps_prefixes:
            self.cache.cool(inserted.handle)
        if not keep:
            self.allocator.free(self.cache.forget(request.prefix.handle))
        self.columns.clear(row)
        self.rows.free(row)
        request.row = NO_ROW
        request.prefix = NO_PREFIX
        request.kv_len = 0
        for group in self.groups:
            group.released(request, row, num_computed, inserted)

    def forget_prefix(self, key: CacheKey, keep: int) -> int:
        """Drop every sequence that begins with `key` from the cache, except pages in use and the
        first `keep` tokens. Returns the number of dropped tokens."""
        self._before_dropping()
        kept = self.cache.match(CacheKey(key.namespace, key.tokens[: keep * TOKEN_BYTES]))
        self.cache.lock(kept.handle)
        pages = self.cache.forget_prefix(key)
        self.cache.unlock(kept.handle)
        self.allocator.free(pages)
        return len(pages) * self.page_size

    def forget_written(self, slots: IntArray) -> None:
        """Drop the nodes with these slots from the cache, unless they are in use."""
        pages = slots // self.page_size
        self.allocator.free(self.cache.forget_pages(pages))
        if self.copies is not None:
            self.copies.parts.forget(pages)

    def reset_cache(self) -> None:
        """Empty the prefix cache. No request may have a lock in it; pins and leases are lost."""
        for holder in self.holders:
            holder.before_emptying(EMPTIED)
        self.pins.lose_all(EMPTIED)
        self.allocator.free(self.cache.reset())
        for holder in self.holders:
            holder.after_emptying()

    def reset(self) -> None:
        """Free all rows and pages, and empty the cache. Reads no state that a fault may have
        damaged.

        The caller has saved the tokens of the requests with rows (`known_tokens`), and calls
        `forget_kv` for these requests.
        """
        for holder in self.holders:
            holder.before_reset(EMPTIED)
        # Before the cache, so that the groups that listen to it find nothing left to do.
        for group in self.groups:
            group.reset()
        self.prefixes.forget()
        if self.copies is not None:
            self.copies.reset()
        self.pins.forget_all(EMPTIED)
        self.cache.drop()
        self.rows.reset()
        self.columns.reset()
        self.allocator.reset()
        for holder in self.holders:
            holder.after_reset()

    def weights_changed(self) -> None:
        """All KV until now, wherever it is, was computed with other weights than later KV."""
        for holder in self.holders:
            holder.weights_changed(OTHER_WEIGHTS)

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
        return TableWrites(*joined(self.rows.take_writes()))

    def with_groups(self, plan: Plan) -> Plan:
        """The plan with the slots of layers that have memory of their own.

        Called once for each plan, after all its memory has been allocated.
        """
        for group in self.groups:
            plan = group.with_slots(plan)
        return plan

    # When memory runs out

    def reclaim(self) -> bool:
        """Ask for memory back that neither requests nor the prefix cache use. Returns whether some
        will come back later."""
        awaited = [holder.reclaim() for holder in self.holders]
        return any(awaited)

    # Inside

    def _before_dropping(self) -> None:
        """Computed tokens are invalid, or not wanted any more: the tree must be able to drop
        them."""
        for holder in self.holders:
            holder.tokens_become_invalid()

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
        if self.copies is not None and present < inserted.length:
            self.copies.parts.inserted_by(inserted.handle, request.message.tenant)
        if present > before:
            # Another request has inserted the same tokens in the meantime: its pages are used.
            self.allocator.free(pages[before // page_size : present // page_size])
        for group in self.groups:
            group.inserted(request, inserted, before)
        return inserted
