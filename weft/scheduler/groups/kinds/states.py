"""Layers that keep a state instead of K and V.

Each row has a slot for the state after its last token, and the prefix cache keeps snapshots of
states; a cached prefix can be used up to a snapshot. A request needs a slot for its state to be
admitted. This module knows no queue or policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.arrays import IntArray, or_zeros
from weft.memory.accounting.audit import Fault
from weft.memory.accounting.holders import ResumeStateInUse
from weft.memory.prefix_cache import Handle, Inserted
from weft.memory.states.audit import STATES, audit_states, find_state_faults
from weft.memory.states.group import StateGroup, WantedCopy
from weft.memory.tiers.resume_states import StateResumeStates
from weft.plan.step import Plan, StateSlots
from weft.scheduler.groups.protocol import (
    GroupBudget,
    GroupLedger,
    GroupParts,
    KvGroup,
    Lack,
    MemoryName,
    PassFacts,
    Shortage,
)
from weft.scheduler.request import NO_ROW, Request, RequestState
from weft.scheduler.settings import LEAST_STATE_SLOTS, StateSettings

STATE_SLOT = MemoryName("slot for a state", is_tokens=False, option="--max-mamba-cache-size")


class StatefulLayers(KvGroup):
    pins_firmly = False
    resumes_everywhere = False

    def __init__(self, parts: GroupParts, settings: StateSettings) -> None:
        cache = parts.cache
        columns = parts.columns
        num_rows = len(columns.kv_len)
        self.memory = StateGroup(num_slots=settings.num_slots, num_rows=num_rows, pins=parts.pins)
        cache.tree.listeners.append(self.memory.snapshots)
        self.ledger = StateLedger(self.memory)
        self._cache = cache
        self._columns = columns
        self._page_size = cache.page_size
        self._border = settings.border(cache.page_size)
        self._least_shared = settings.least_shared
        # Length at which a request leaves a copy because others begin the same way (0: none), by
        # id.
        self._before_rows: dict[int, int] = {}  # of requests that are locked and have no row yet
        self._branches: dict[int, int] = {}  # by row

    # Capacity

    def longest(self, capacity: int) -> int:
        if self.memory.capacity < LEAST_STATE_SLOTS:
            return 0  # too many slots are quarantined to run any request
        return capacity

    def new_budget(self, facts: PassFacts) -> GroupBudget:
        return StateBudget(self.memory)

    # A waiting request

    def resumable(self, handle: Handle, length: int) -> tuple[Handle, int]:
        """A prefix can be resumed after its last snapshot."""
        return self.memory.snapshots.deepest(handle, length)

    def lock(self, request: Request, found_len: int) -> None:
        handle, length, _, _ = request.prefix
        if handle is not None:
            self.memory.snapshots.hold(handle)
        branch = 0
        # A prefix that was found twice will be requested again (Marconi).
        if found_len - length >= self._least_shared:
            branch = found_len // self._border * self._border
        self._before_rows[request.id] = branch

    def unlock(self, request: Request, handle: Handle) -> None:
        branch = self._before_rows.pop(request.id, None)
        if branch is not None and handle is not None:
            self.memory.snapshots.let_go(handle)

    def next_copy(self, request: Request) -> int:
        branch = self._before_rows.get(request.id, 0)
        if request.row != NO_ROW:
            branch = self._branches.get(request.row, 0)
        if branch > request.kv_len:
            return branch
        return self._border_before(request.fill_len)

    # A request with a row

    def take_row(self, request: Request) -> None:
        row = request.row
        branch = self._before_rows.pop(request.id)
        if branch:
            self._branches[row] = branch
        self.memory.begin(row, request.prefix.handle, request.id)

    def inserted(self, request: Request, inserted: Inserted, since: int) -> None:
        row = request.row
        for copy in self.memory.take_kept(row, inserted.length):
            # This splits the tree's node at the position of the copy.
            key = request.cache_key(self._columns.packed(row, copy.length))
            found = self._cache.match(key)
            assert found.length == copy.length, "what was inserted is not found"
            self.memory.snapshots.put(found.handle, copy.slot)

    def released(
        self, request: Request, row: int, num_computed: int, inserted: Inserted | None
    ) -> None:
        if inserted is not None and inserted.handle is not None:
            has_all = inserted.length == num_computed
            # While it is open which drafts count, the row's state may be one after wrong drafts.
            if has_all and not self.memory.is_open(row):
                # All its computed tokens are in the tree, so its own state becomes a snapshot at no
                # cost.
                self.memory.snapshots.put(inserted.handle, self.memory.take_slot(row))
        self.memory.end(row)
        self._branches.pop(row, None)

    def reset(self) -> None:
        self.memory.reset()
        self._before_rows.clear()
        self._branches.clear()

    def room_for_drafts(self, num_tokens: int) -> int:
        return self.memory.room_for_undo(num_tokens)

    def cut(self, row: int, kv_len: int, before: int) -> None:
        request = self._columns.requests[row]
        shares = self._cache.shares and request is not None and request.message.shares_kv
        self.memory.go_back(row, kv_len, self._border if shares else 0)

    def with_slots(self, plan: Plan) -> Plan:
        num_drafts = or_zeros(plan.drafts, len(plan.rows))
        undo: list[WantedCopy] = []
        for row_index in np.flatnonzero(num_drafts).tolist():
            request = self._columns.requests[plan.rows[row_index]]
            end = int(plan.starts[row_index] + plan.lens[row_index])
            after_drafts = range(end - int(num_drafts[row_index]), end)
            undo += [WantedCopy(row_index, length, request.id) for length in after_drafts]
        # A copy after a draft might be one of a wrong text.
        ends = plan.starts + plan.lens - num_drafts
        is_crossing = ends // self._border > plan.starts // self._border
        # Prompts also leave one on the last page before their end.
        is_crossing |= plan.lens > 1
        wanted: list[WantedCopy] = []
        # Few of the decoding rows reach a border in a step.
        for row_index in np.flatnonzero(is_crossing).tolist():
            request = self._columns.requests[plan.rows[row_index]]
            if self._cache.shares and request.message.shares_kv:
                lengths = self._copies_of(
                    request, int(plan.starts[row_index]), int(ends[row_index])
                )
                wanted += [WantedCopy(row_index, length, request.id) for length in lengths]
        moves = self.memory.plan(plan.rows, plan.starts, wanted, undo)
        return replace(plan, states=StateSlots(*moves))

    def resume_states(self, block_len: int) -> StateResumeStates:
        return StateResumeStates(self.memory)

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
                last_page = (end - 1) // self._page_size * self._page_size
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


class StateLedger(GroupLedger):
    pool = STATES

    def __init__(self, memory: StateGroup) -> None:
        self._memory = memory

    def usage(self) -> dict[str, int]:
        memory = self._memory
        num_used = memory.num_rows + memory.num_kept + memory.num_lent + memory.num_undo
        return {
            "state_slots": memory.capacity,
            "state_slots_used": num_used,
            "state_slots_evictable": len(memory.snapshots),
            "total_evicted_states": memory.snapshots.total_evicted,
        }

    @property
    def imbalance(self) -> int:
        return self._memory.imbalance

    def audit(self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]) -> None:
        audit_states(self._memory, self._owned_by(requests, in_use))

    def find_faults(
        self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]
    ) -> list[Fault]:
        return find_state_faults(self._memory, self._owned_by(requests, in_use))

    def quarantine(self, faults: Sequence[Fault], in_use: Sequence[ResumeStateInUse]) -> None:
        for fault in faults:
            self._memory.allocator.quarantine(fault.page, is_owned=fault.is_owned)

    def last_owner(self, fault: Fault) -> int:
        return int(self._memory.allocator.last_owner[fault.page])

    def _owned_by(
        self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]
    ) -> dict[str, IntArray]:
        """The slots that each request owns, and those into which states are being read. What
        others only read belongs to the cache."""
        owned = self._memory.owned_by({name: one.row for name, one in requests.items()})
        for resume_state in in_use:
            if resume_state.is_reserved:
                owned[resume_state.name] = resume_state.indices
        return owned


class StateBudget(GroupBudget):
    """A request that has no row needs a slot."""

    def __init__(self, memory: StateGroup) -> None:
        self._memory = memory
        self._num_promised = 0  # slots promised to picked requests

    def fits(self, request: Request, extend: int, reserve: int, *, is_alone: bool) -> bool:
        return request.row != NO_ROW or self._memory.available > self._num_promised

    def take(self, request: Request, extend: int, reserve: int) -> None:
        if request.row == NO_ROW:
            self._num_promised += 1

    def shortage(self, request: Request, extend: int, reserve: int) -> Shortage | None:
        if self.fits(request, extend, reserve, is_alone=False):
            return None
        return Shortage(Lack.GROUP, 1, 0, memory=STATE_SLOT)

    def lacking(self, request: Request, extend: int, reserve: int) -> float:
        if self.fits(request, extend, reserve, is_alone=False):
            return super().lacking(request, extend, reserve)
        return 0.0  # retracting any request frees a slot


def group(parts: GroupParts) -> StatefulLayers | None:
    """The layers that keep a state, if the model has some."""
    settings = parts.settings.states
    return None if settings is None else StatefulLayers(parts, settings)


GROUP = group
