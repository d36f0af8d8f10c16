"""How much KV memory there is, and who owns it: sums over rows, pool, prefix cache and groups.

`KvRoom` says what the next steps could allocate, and `KvAccounts` finds pages without exactly one
owner. Neither gives a page to anyone; that is the part of `KvMemory` (`kv.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.audit import Fault, audit, find_faults
from weft.memory.accounting.holders import Holder, ResumeStateInUse
from weft.memory.accounting.part_pages import PartPages
from weft.memory.allocator import PageAllocator, RowTable, num_pages_for
from weft.memory.radix.cache import RadixCache
from weft.scheduler.groups.protocol import GroupBudget, KvGroup, PassFacts
from weft.scheduler.request import Columns, Request

POOL = ""  # the pool of all layers without a group, in reports of faults


class KvRoom:
    """The memory that could be allocated now, and what decode steps need. `repeats_runs`: a step
    may compute the run of the step before again, whose drafts are not compared yet."""

    def __init__(
        self,
        allocator: PageAllocator,
        cache: RadixCache,
        columns: Columns,
        groups: Sequence[KvGroup],
        *,
        part_pages: PartPages | None,
        repeats_runs: bool,
    ) -> None:
        self._allocator = allocator
        self._part_pages = part_pages
        self._cache = cache
        self._columns = columns
        self._groups = groups
        self._page_size = allocator.page_size
        self._repeats_runs = repeats_runs

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that can run."""
        num_pages = self._allocator.num_pages - len(self._allocator.quarantined)
        capacity = num_pages * self._page_size
        for group in self._groups:
            capacity = group.longest(capacity)
        return capacity

    @property
    def rest(self) -> int:
        """Tokens that could be allocated now in the pool: free, kept for copies, evictable or
        pinned (pins are removed)."""
        cache = self._cache
        num_pages = self._allocator.num_free + cache.evictable_pages + cache.pinned_pages
        if self._part_pages is not None:
            num_pages += self._part_pages.num_owned
        return num_pages * self._page_size

    @property
    def available(self) -> int:
        """Tokens that could be allocated now, in the pool and in all groups."""
        available = self.rest
        for group in self._groups:
            in_group = group.available
            if in_group is not None:
                available = min(available, in_group)
        return available

    @property
    def evictable(self) -> int:
        """Of the available tokens, those that the prefix cache would have to give up."""
        return min(self._cache.evictable_pages * self._page_size, self.available)

    def left(self) -> str:
        """What is left of memory, as the end of a text about tokens that do not fit."""
        num_evictable = self.evictable
        num_free = self.available - num_evictable
        return f", of which now {num_free:,} are free and {num_evictable:,} can be evicted"

    def out_of_memory(self, step: str, num_tokens: int) -> str:
        """What users read if a prefill or a decode needs memory that is not there."""
        num_evictable = self.evictable
        return (
            f"{step} out of memory: {num_tokens:,} tokens to allocate, "
            f"{self.available - num_evictable:,} are free and {num_evictable:,} can be evicted; "
            "fewer running requests need less (--max-running-requests)"
        )

    def new_budgets(self, facts: PassFacts) -> list[GroupBudget]:
        """The budgets of the groups in one pass over the queue."""
        return [group.new_budget(facts) for group in self._groups]

    def decode_tokens(self, rows: IntArray) -> int:
        """Tokens that the next decode step of `rows` computes. A run whose drafts are not compared
        yet counts again."""
        columns = self._columns
        starts = columns.kv_len[rows]
        if self._repeats_runs:
            starts = np.minimum(starts, columns.known_len[rows])
        num_tokens = columns.seq_len[rows] - starts
        return int(num_tokens.sum())

    def decode_pages(self, rows: IntArray) -> int:
        """Pages that the next decode step of `rows` allocates: one for each token that begins a
        page.

        page size 4, row with kv_len 6 and seq_len 9:   0 1 2 3 | 4 5 . . | .
                                      ceil(9/4) - ceil(6/4) = 3 - 2 = 1 page for token 8
        """
        page_size = self._page_size
        ends = self._columns.seq_len.take(rows)
        starts = self._columns.kv_len.take(rows)
        # -(-n // size) is n / size rounded up; so this subtracts the pages that the rows have.
        num_pages = -(-ends // page_size)
        num_pages += -starts // page_size
        return int(num_pages.sum())

    def decode_fits(self, rows: IntArray) -> bool:
        """Whether there is memory for the next decode step of `rows`."""
        for group in self._groups:
            group.before_decode(rows)
        available = self.available
        # Usually there is memory even if each token began a page, and that count takes half the
        # time.
        num_tokens = (self._columns.seq_len - self._columns.kv_len).take(rows)
        if int(num_tokens.sum()) * self._page_size <= available:
            return True
        return self.decode_pages(rows) * self._page_size <= available

    def lacking(self, rows: IntArray, num_ahead: int) -> int:
        """Tokens of memory that are missing for the next decode step of `rows`, and for `num_ahead`
        tokens of each row."""
        num_tokens = self.decode_pages(rows) * self._page_size
        lacking = max(num_tokens, len(rows) * num_ahead) - self.rest
        for group in self._groups:
            lacking = max(lacking, group.lacking(rows, num_tokens, num_ahead))
        return lacking

    def freed_tokens(self, request: Request) -> int:
        """Tokens that become available if this request is retracted, in the memory of which the
        smallest part is left."""
        tightest: KvGroup | None = None
        rest = self.rest
        num_pages = self._allocator.num_pages
        for group in self._groups:
            in_group = group.available
            if in_group is not None and in_group * num_pages <= rest * group.num_pages:
                tightest = group
                rest = in_group
                num_pages = group.num_pages
        if tightest is not None:
            return tightest.freed_tokens(request)
        num_computed = int(self._columns.kv_len[request.row])
        own = num_pages_for(num_computed - request.prefix.length, self._page_size)
        # Nodes that it shares with other requests stay locked by them.
        unshared = self._cache.unshared_pages(request.prefix.handle)
        return (own + unshared) * self._page_size

    def usage(self) -> dict[str, int]:
        """The fields of `Stats` about memory that requests own, or lock in the cache."""
        num_pages = self._allocator.num_pages - len(self._allocator.quarantined)
        usage = {"kv_used": num_pages * self._page_size - self.rest}
        for group in self._groups:
            usage.update(group.ledger.usage())
        return usage


class KvAccounts:
    """The owners of all pages. `holders` use pages without a request; others may join them."""

    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: RadixCache,
        columns: Columns,
        *,
        groups: Sequence[KvGroup],
        holders: Sequence[Holder],
    ) -> None:
        self._rows = rows
        self._allocator = allocator
        self._cache = cache
        self._columns = columns
        self._groups = groups
        self._holders = holders
        self._page_size = allocator.page_size

    def audit(self, requests: Mapping[str, Request]) -> None:
        """Check the owner of every page. `requests` are those with a row, by name. Raises
        AccountingError."""
        in_use = self._resume_states_in_use()
        audit(self._allocator, self._cache, self._owned_by(requests))
        for group in self._groups:
            group.ledger.audit(requests, in_use)
        assert not self.imbalance, f"the sum of all pages is off by {self.imbalance}"

    def find_faults(self, requests: Mapping[str, Request]) -> list[Fault]:
        """The pages that do not have exactly one owner. Raises AccountingError for a page outside
        of the pool."""
        in_use = self._resume_states_in_use()
        faults = find_faults(self._allocator, self._cache, self._owned_by(requests))
        for group in self._groups:
            faults += group.ledger.find_faults(requests, in_use)
        return faults

    def quarantine(self, faults: Sequence[Fault]) -> None:
        """Take the faulty pages out of use, now or when their owners free them."""
        for fault in faults:
            if fault.pool == POOL:
                self._allocator.quarantine(fault.page, is_owned=fault.is_owned)
        in_use = self._resume_states_in_use()
        for group in self._groups:
            own = [fault for fault in faults if fault.pool == group.ledger.pool]
            if own:
                group.ledger.quarantine(own, in_use)

    def last_owner(self, fault: Fault) -> int:
        """The id of the request that owned the page last, or NOBODY."""
        for group in self._groups:
            if fault.pool == group.ledger.pool:
                return group.ledger.last_owner(fault)
        return int(self._allocator.last_owner[fault.page])

    def owned_pages(self, request: Request) -> IntArray:
        """Pages that a request with a row owns, without those of the cache."""
        num_computed = int(self._columns.kv_len[request.row])
        return self._rows.pages_of(request.row, request.prefix.length, num_computed)

    @property
    def num_owned(self) -> int:
        """Pages that requests and holders own, without those of the cache, computed from their
        rows. Takes a few microseconds."""
        num_tokens = self._columns.kv_len - self._columns.cached_len
        if self._page_size > 1:
            num_tokens += self._page_size - 1  # a partly filled page counts
            num_tokens //= self._page_size
        num_owned = int(np.add.reduce(num_tokens))
        for holder in self._holders:
            num_owned += holder.num_owned
        return num_owned

    @property
    def imbalance(self) -> int:
        """free + quarantined + cached + owned - all: pages that are counted twice, or, if negative,
        not at all; of a group, if that of the pool is right."""
        allocator = self._allocator
        cache = self._cache
        cached = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
        not_free = len(allocator.quarantined) + cached + self.num_owned
        imbalance = allocator.num_free + not_free - allocator.num_pages
        # Two wrong sums must not cancel out.
        for group in self._groups:
            imbalance = imbalance or group.ledger.imbalance
        return imbalance

    def _owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        """The pages that each of the requests and of the holders owns by itself."""
        owned = {name: self.owned_pages(request) for name, request in requests.items()}
        for holder in self._holders:
            owned.update(holder.owned())
        return owned

    def _resume_states_in_use(self) -> list[ResumeStateInUse]:
        return [state for holder in self._holders for state in holder.resume_states_in_use()]
