"""KV memory of requests if layers with windows have pages of their own.

Each token takes a slot in both pools, at the same position of its row. The pool of all other layers
is that of `KvMemory`. A row frees pages of the pool of windows when they leave its window. This
module knows no queue, policy or plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.audit import Fault
from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.prefix_cache import Inserted, PrefixCache
from weft.memory.window.audit import WINDOWS, audit_windows, find_window_faults
from weft.memory.window.group import WindowGroup
from weft.plan.step import Plan, WindowSlots
from weft.scheduler.kv import KvMemory, table_writes
from weft.scheduler.request import CachedPrefix, Columns, Request
from weft.scheduler.settings import WindowSettings


class WindowedKv(KvMemory):
    """`chunk_len`: the longest piece of a prompt in one step; None: prompts are never cut."""

    pins_firmly = False

    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: PrefixCache,
        columns: Columns,
        settings: WindowSettings,
        chunk_len: int | None,
    ) -> None:
        super().__init__(rows, allocator, cache, columns)
        self.windows = WindowGroup(
            window=settings.window,
            num_pages=settings.num_pages,
            page_size=self.page_size,
            shape=columns.tokens.shape,
            pins=self.pins,
        )
        cache.listeners.append(self.windows.tails)
        self.chunk_len = chunk_len
        self._least_pages = settings.least_pages(self.page_size, chunk_len or 0)
        # Pages of admitted requests without a row, by id.
        self._before_rows: dict[int, IntArray] = {}
        self._step_slots: list[IntArray] = []  # of the tokens of the planned step

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that can run. If prompts are never cut, all tokens of a
        prompt are in both pools at once."""
        in_all = super().capacity
        in_windows = self.windows.capacity
        if self.chunk_len is None:
            return min(in_all, in_windows)
        if in_windows < self._least_pages * self.page_size:
            return 0  # too many pages are quarantined to run any request
        return in_all

    @property
    def available(self) -> int:
        """Tokens that could be allocated now, in both pools."""
        return min(super().available, self.windows.available)

    @property
    def rest(self) -> int:
        """Tokens that could be allocated now in the pool of layers without windows."""
        return super().available

    # A waiting request

    def match(self, request: Request, most: int | None = None) -> None:
        """Find the cached prefix of a waiting request, up to a position before which a whole window
        is cached."""
        super().match(request, most)
        handle = request.prefix.handle
        if handle is None:
            return
        num_pages = request.prefix.length // self.page_size
        node, num_pages = self.windows.tails.deepest(handle, num_pages)
        if node is handle:
            return
        length = num_pages * self.page_size
        pages = self.cache.pages_of(node)
        request.prefix = CachedPrefix(node, length, pages, is_locked=False)
        request.kv_len = length
        if self.keeps_items_whole:
            self._leave_items_whole(request)

    def lock(self, request: Request) -> None:
        super().lock(request)
        if request.prefix.handle is not None:
            pages = self.windows.tails.window_before(request.prefix.handle)
            self.windows.pool.hold(pages)
            self._before_rows[request.id] = pages

    def unlock(self, request: Request) -> None:
        super().unlock(request)
        pages = self._before_rows.pop(request.id, None)
        if pages is not None:
            self.windows.pool.give_back(pages)

    # A request with a row

    def take_row(self, request: Request) -> None:
        super().take_row(request)
        pages = self._before_rows.pop(request.id, None)
        if pages is not None:
            self.windows.begin(request.row, pages, request.prefix.length)

    def extend(self, request: Request) -> IntArray:
        slots = super().extend(request)
        start = request.kv_len
        self._step_slots.append(
            self.windows.extend(request.row, start, request.extend_end, request.id)
        )
        return slots

    def slots_again(self, request: Request, start: int) -> IntArray:
        in_windows = self.windows.slots[request.row, start : request.extend_end]
        self._step_slots.append(in_windows.copy())
        return super().slots_again(request, start)

    def withdraw(self, request: Request, start: int) -> None:
        self.windows.withdraw(request.row, start, request.kv_len)
        super().withdraw(request, start)

    def decode_fits(self, rows: IntArray) -> bool:
        self._give_back(rows)
        return super().decode_fits(rows)

    def extend_running(self, rows: IntArray, positions: IntArray) -> IntArray:
        # A row has one entry for each of its tokens.
        is_first = positions == self.columns.kv_len[rows]
        self._give_back(rows[is_first])
        slots = super().extend_running(rows, positions)
        begins_page = positions % self.page_size == 0
        ids = self.columns.ids[rows[begins_page]]
        self._step_slots.append(self.windows.extend_running(rows, positions, ids))
        return slots

    def cut(self, row: int, kv_len: int) -> None:
        self.windows.cut(row, kv_len, int(self.columns.kv_len[row]))
        super().cut(row, kv_len)

    def share(self, request: Request) -> None:
        super().share(request)
        self._give_back(np.array([request.row], dtype=np.int32))

    def release(self, request: Request, *, keep: bool = True) -> None:
        row = request.row
        num_computed = int(self.columns.kv_len[row])
        super().release(request, keep=keep)
        # Pages that tails use are not freed.
        self.windows.end(row, num_computed)

    def reset(self) -> None:
        # First of all, so that the listeners of the cache find nothing left to do.
        self.windows.reset()
        self._before_rows.clear()
        self._step_slots = []
        super().reset()

    def with_groups(self, plan: Plan) -> Plan:
        slots = np.concatenate(self._step_slots)
        self._step_slots = []
        table = None
        if self.windows.writes:
            table = table_writes(self.windows.writes)
            self.windows.writes = []
        return replace(plan, window=WindowSlots(slots, table))

    # When memory runs out

    def growth(self, rows: IntArray) -> IntArray:
        """[n] tokens by which each of `rows` [n] can still grow in its windows."""
        return self.windows.growth(rows, self.columns.kv_len[rows])

    def lacking(self, rows: IntArray, num_ahead: int) -> int:
        in_all = max(self.decode_pages(rows) * self.page_size, len(rows) * num_ahead)
        ahead = np.minimum(self.growth(rows), num_ahead)
        in_windows = max(self.decode_pages(rows) * self.page_size, int(ahead.sum()))
        return max(in_all - self.rest, in_windows - self.windows.available)

    def freed_tokens(self, request: Request) -> int:
        """Tokens that become available in the pool with less memory left if this request is
        retracted."""
        windows = self.windows
        num_pages = self.allocator.num_pages
        if self.rest * windows.pool.allocator.num_pages < windows.available * num_pages:
            return super().freed_tokens(request)
        pages = windows.pages_of(request.row, int(self.columns.kv_len[request.row]))
        num_alone = int(np.count_nonzero(windows.pool.held[pages] == 1))
        return num_alone * self.page_size

    # Accounting

    def usage(self) -> dict[str, int]:
        """The fields of `Stats` about memory of both pools."""
        windows = self.windows
        page_size = self.page_size
        num_pages = self.allocator.num_pages - len(self.allocator.quarantined)
        return {
            "kv_used": num_pages * page_size - self.rest,
            "kv_window_tokens": windows.capacity,
            "kv_window_used": windows.pool.num_held * page_size,
            "kv_window_evictable": windows.pool.evictable_pages * page_size,
            "total_evicted_window_tokens": windows.tails.total_evicted_pages * page_size,
        }

    def audit(self, requests: Mapping[str, Request]) -> None:
        super().audit(requests)
        audit_windows(self.windows, self._held_by(requests))

    def find_faults(self, requests: Mapping[str, Request]) -> list[Fault]:
        faults = super().find_faults(requests)
        return faults + find_window_faults(self.windows, self._held_by(requests))

    def quarantine(self, faults: Sequence[Fault]) -> None:
        super().quarantine([fault for fault in faults if fault.pool != WINDOWS])
        in_windows = [fault for fault in faults if fault.pool == WINDOWS]
        if not in_windows:
            return
        for fault in in_windows:
            self.windows.pool.allocator.quarantine(fault.page, is_owned=fault.is_owned)
        # A row in use has at least one token.
        rows = np.flatnonzero(self.columns.seq_len).astype(np.int32)
        apart = list(self._held_apart().values())
        self.windows.recount(rows, self.columns.kv_len[rows], apart)

    def last_owner(self, fault: Fault) -> int:
        if fault.pool == WINDOWS:
            return int(self.windows.pool.allocator.last_owner[fault.page])
        return super().last_owner(fault)

    @property
    def imbalance(self) -> int:
        # Two wrong sums must not cancel out.
        return super().imbalance or self.windows.pool.imbalance

    # Inside

    def _give_back(self, rows: IntArray) -> None:
        self.windows.give_back(rows, self.columns.kv_len[rows])

    def _held_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        """The pages of windows that each request holds."""
        held = {}
        for name, request in requests.items():
            num_computed = int(self.columns.kv_len[request.row])
            held[name] = self.windows.pages_of(request.row, num_computed)
        return held

    def _held_apart(self) -> dict[str, IntArray]:
        """The pages of windows that other owners hold, by name of the owner."""
        return {}

    def _insert(self, request: Request) -> Inserted:
        since = request.prefix.length
        inserted = super()._insert(request)
        self.windows.leave(request.row, inserted.handle, inserted.length, since)
        return inserted
