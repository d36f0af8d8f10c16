"""Memory of requests if some layers keep a state instead of K and V.

Each row has a slot for the state after its last token, and the prefix cache keeps snapshots of
states; a cached prefix can be used up to a snapshot. K and V of all other layers are handled as in
`KvMemory`. This module knows no queue or policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.audit import Fault
from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.prefix_cache import Inserted, PrefixCache
from weft.memory.states.audit import STATES, audit_states, find_state_faults
from weft.memory.states.group import StateGroup, WantedCopy
from weft.plan.step import Plan, StateSlots
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import NO_ROW, CachedPrefix, Columns, Request, RequestState
from weft.scheduler.settings import LEAST_STATE_SLOTS, StateSettings


class FoundPrefix(NamedTuple):
    """The length of a request's prefix in the tree, even if no snapshot makes it usable."""

    id: int
    length: int  # in tokens


NOTHING_FOUND = FoundPrefix(-1, 0)
NOTHING_INSERTED = Inserted(None, 0, 0)


class StatefulKv(KvMemory):
    pins_firmly = False

    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: PrefixCache,
        columns: Columns,
        settings: StateSettings,
    ) -> None:
        super().__init__(rows, allocator, cache, columns)
        self.states = StateGroup(
            num_slots=settings.num_slots, num_rows=rows.num_rows, pins=self.pins
        )
        cache.listeners.append(self.states.snapshots)
        self._border = settings.border(self.page_size)
        self._least_shared = settings.least_shared
        self._found = NOTHING_FOUND  # by the last call of `match`
        # by the last request that inserted its tokens into the cache
        self._inserted = NOTHING_INSERTED
        # Length at which a request leaves a copy because others begin the same way (0: none), by
        # id.
        self._before_rows: dict[int, int] = {}  # of requests that are locked and have no row yet
        self._branches: dict[int, int] = {}  # by row

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that can run."""
        if self.states.capacity < LEAST_STATE_SLOTS:
            return 0  # too many slots are quarantined to run any request
        return super().capacity

    # A waiting request

    def match(self, request: Request, most: int | None = None) -> None:
        """Find the cached prefix of a waiting request, up to its last snapshot."""
        super().match(request, most)
        handle, length, _, _ = request.prefix
        self._found = FoundPrefix(request.id, length)
        if handle is None:
            return
        node, length = self.states.snapshots.deepest(handle, length)
        if node is handle:
            return
        pages = self.cache.pages_of(node)
        request.prefix = CachedPrefix(node, length, pages, is_locked=False)
        request.kv_len = length

    def lock(self, request: Request) -> None:
        super().lock(request)
        handle, length, _, _ = request.prefix
        if handle is not None:
            self.states.snapshots.hold(handle)
        branch = 0
        # A prefix that was found twice will be requested again (Marconi).
        if self._found.id == request.id and self._found.length - length >= self._least_shared:
            branch = self._found.length // self._border * self._border
        self._before_rows[request.id] = branch

    def unlock(self, request: Request) -> None:
        handle = request.prefix.handle
        super().unlock(request)
        branch = self._before_rows.pop(request.id, None)
        if branch is not None and handle is not None:
            self.states.snapshots.let_go(handle)

    # A request with a row

    def take_row(self, request: Request) -> None:
        super().take_row(request)
        row = request.row
        branch = self._before_rows.pop(request.id)
        if branch:
            self._branches[row] = branch
        self.states.begin(row, request.prefix.handle, request.id)

    def next_copy(self, request: Request) -> int:
        """The length in tokens at which a picked request leaves the next copy on which others can
        count; 0: none."""
        branch = self._before_rows.get(request.id, 0)
        if request.row != NO_ROW:
            branch = self._branches.get(request.row, 0)
        if branch > request.kv_len:
            return branch
        return self._border_before(request.fill_len)

    def release(self, request: Request, *, keep: bool = True) -> None:
        row = request.row
        num_computed = int(self.columns.kv_len[row])
        self._inserted = NOTHING_INSERTED
        super().release(request, keep=keep)
        handle, length, _ = self._inserted
        if handle is not None and length == num_computed:
            # All its computed tokens are in the tree, so its own state becomes a snapshot at no
            # cost.
            self.states.snapshots.put(handle, self.states.take_slot(row))
        self.states.end(row)
        self._branches.pop(row, None)

    def reset(self) -> None:
        # First of all, so that the listeners of the cache find nothing left to do.
        self.states.reset()
        self._found = NOTHING_FOUND
        self._inserted = NOTHING_INSERTED
        self._before_rows.clear()
        self._branches.clear()
        super().reset()

    def with_groups(self, plan: Plan) -> Plan:
        ends = plan.starts + plan.lens
        is_crossing = ends // self._border > plan.starts // self._border
        # Prompts also leave one on the last page before their end.
        is_crossing |= plan.lens > 1
        wanted: list[WantedCopy] = []
        # Few of the decoding rows reach a border in a step.
        for place in np.flatnonzero(is_crossing).tolist():
            request = self.columns.requests[plan.rows[place]]
            if self.cache.shares and request.message.shares_kv:
                lengths = self._copies_of(request, int(plan.starts[place]), int(ends[place]))
                wanted += [WantedCopy(place, length, request.id) for length in lengths]
        moves = self.states.plan(plan.rows, plan.starts, wanted)
        return replace(plan, states=StateSlots(*moves))

    # Accounting

    def usage(self) -> dict[str, int]:
        states = self.states
        return {
            **super().usage(),
            "state_slots": states.capacity,
            "state_slots_used": states.num_rows + states.num_kept,
            "state_slots_evictable": len(states.snapshots),
            "total_evicted_states": states.snapshots.total_evicted,
        }

    def audit(self, requests: Mapping[str, Request]) -> None:
        # The audit that names owners comes first, because the sum below is of both pools.
        audit_states(self.states, self._slots_owned_by(requests))
        super().audit(requests)

    def find_faults(self, requests: Mapping[str, Request]) -> list[Fault]:
        faults = super().find_faults(requests)
        return faults + find_state_faults(self.states, self._slots_owned_by(requests))

    def quarantine(self, faults: Sequence[Fault]) -> None:
        super().quarantine([fault for fault in faults if fault.pool != STATES])
        for fault in faults:
            if fault.pool == STATES:
                self.states.allocator.quarantine(fault.page, is_owned=fault.is_owned)

    def last_owner(self, fault: Fault) -> int:
        if fault.pool == STATES:
            return int(self.states.allocator.last_owner[fault.page])
        return super().last_owner(fault)

    @property
    def imbalance(self) -> int:
        # Two wrong sums must not cancel out.
        return super().imbalance or self.states.imbalance

    # Inside

    def _copies_of(self, request: Request, start: int, end: int) -> list[int]:
        """Lengths at which a row leaves copies of its state in a step from `start` to `end`."""
        last = end // self._border * self._border
        if request.state is RequestState.DECODING:
            return [last] if last > start else []
        lengths = []
        branch = self._branches.get(request.row, 0)
        last_page = 0
        if request.is_prefilled:
            # A request with the same prompt must compute its last token.
            last = self._border_before(end)
            if last > request.cached_tokens or request.message.handoff is not None:
                # A prompt that crosses a border is long enough to be worth a second slot. Of a
                # prompt that is lent, another server takes as much as it can.
                last_page = (end - 1) // self.page_size * self.page_size
        if start < branch < last:
            lengths.append(branch)
        if last > start:
            lengths.append(last)
        if last_page > max(start, last):
            lengths.append(last_page)
        return lengths

    def _border_before(self, length: int) -> int:
        """The last border before the last of `length` tokens."""
        return (length - 1) // self._border * self._border

    def _slots_owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        return self.states.owned_by({name: one.row for name, one in requests.items()})

    def _insert(self, request: Request) -> Inserted:
        inserted = super()._insert(request)
        self._inserted = inserted
        row = request.row
        for copy in self.states.take_kept(row, inserted.length):
            # This splits the tree's node at the position of the copy.
            key = request.cache_key(self.columns.packed(row, copy.length))
            found = self.cache.match(key)
            assert found.length == copy.length, "what was inserted is not found"
            self.states.snapshots.put(found.handle, copy.slot)
        return inserted
