"""Layers with sliding windows that have pages of their own.

Each token takes a slot in both pools, at the same position of its row. A row frees pages of the
pool of windows when they leave its window.

    windows:  | running rows | what they grow by | promised here | tokens_left |

In the pool of windows a row does not grow beyond its window and the tokens of a step. So less
memory is reserved there: the growth until the window is full. This module knows no queue or policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.audit import Fault
from weft.memory.accounting.holders import ResumeStateInUse
from weft.memory.allocator import joined, num_pages_for
from weft.memory.prefix_cache import Handle, Inserted
from weft.memory.tiers.resume_states import WindowResumeStates
from weft.memory.window.audit import WINDOWS, audit_windows, find_window_faults
from weft.memory.window.group import WindowGroup
from weft.plan.step import Plan, TableWrites, WindowSlots
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
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import CLIP_MAX_NEW_TOKENS, WindowSettings

WINDOW_MEMORY = MemoryName("KV memory of layers with windows")


class WindowedLayers(KvGroup):
    pins_firmly = False

    def __init__(self, parts: GroupParts, settings: WindowSettings) -> None:
        cache = parts.cache
        columns = parts.columns
        chunk_len = parts.settings.chunk_len
        self.page_size = cache.page_size
        self.memory = WindowGroup(
            sight=settings.sight,
            num_pages=settings.num_pages,
            page_size=self.page_size,
            shape=columns.tokens.shape,
            pins=parts.pins,
        )
        cache.tree.listeners.append(self.memory.tails)
        self.ledger = WindowLedger(self.memory, columns)
        # The longest piece of a prompt in one step; None: prompts are never cut.
        self.chunk_len = chunk_len
        self._columns = columns
        self._least_pages = settings.least_pages(self.page_size, chunk_len or 0)
        # Pages of admitted requests without a row, by id.
        self._before_rows: dict[int, IntArray] = {}
        self._step_slots: list[IntArray] = []  # of the tokens of the planned step

    # Capacity

    def longest(self, capacity: int) -> int:
        """If prompts are never cut, all tokens of a prompt are in both pools at once."""
        in_windows = self.memory.capacity
        if self.chunk_len is None:
            return min(capacity, in_windows)
        if in_windows < self._least_pages * self.page_size:
            return 0  # too many pages are quarantined to run any request
        return capacity

    @property
    def available(self) -> int:
        return self.memory.available

    @property
    def num_pages(self) -> int:
        return self.memory.pool.allocator.num_pages

    def growth(self, rows: IntArray) -> IntArray:
        """[n] tokens by which each of `rows` [n] can still grow in its windows."""
        return self.memory.growth(rows, self._columns.kv_len[rows])

    def new_budget(self, facts: PassFacts) -> GroupBudget:
        expected = self._expected_growth(facts.running_rows, facts.ratio)
        return WindowBudget(self, facts.mixed_kv, expected)

    def _expected_growth(self, rows: IntArray, ratio: float) -> int:
        """Tokens by which running requests are expected to grow in their windows."""
        columns = self._columns
        left = columns.max_len[rows] - columns.seq_len[rows]
        left = np.clip(left, 0, CLIP_MAX_NEW_TOKENS)
        # Rounded before the sum, so that the sum is the same on every machine.
        at_eos = np.ceil(left * ratio).astype(np.int64)
        expected = np.where(columns.stops_at_eos[rows], at_eos, left)
        return int(np.minimum(expected, self.growth(rows)).sum())

    # A waiting request

    def resumable(self, handle: Handle, length: int) -> tuple[Handle, int]:
        """A prefix can be resumed where a whole window before its end is cached."""
        node, num_pages = self.memory.tails.deepest(handle, length // self.page_size)
        return node, num_pages * self.page_size

    def lock(self, request: Request, found_len: int) -> None:
        if request.prefix.handle is not None:
            pages = self.memory.tails.window_before(request.prefix.handle)
            self.memory.pool.hold(pages)
            self._before_rows[request.id] = pages

    def unlock(self, request: Request, handle: Handle) -> None:
        pages = self._before_rows.pop(request.id, None)
        if pages is not None:
            self.memory.pool.give_back(pages)

    # A request with a row

    def take_row(self, request: Request) -> None:
        pages = self._before_rows.pop(request.id, None)
        if pages is not None:
            self.memory.begin(request.row, pages, request.prefix.length)

    def extend(self, request: Request) -> None:
        slots = self.memory.extend(request.row, request.kv_len, request.extend_end, request.id)
        self._step_slots.append(slots)

    def slots_again(self, request: Request, start: int) -> None:
        slots = self.memory.slots[request.row, start : request.extend_end]
        self._step_slots.append(slots.copy())

    def withdraw(self, request: Request, start: int) -> None:
        self.memory.withdraw(request.row, start, request.kv_len)

    def before_decode(self, rows: IntArray) -> None:
        self.memory.give_back(rows, self._columns.kv_len[rows])

    def extend_running(self, rows: IntArray, positions: IntArray) -> None:
        begins_page = positions % self.page_size == 0
        ids = self._columns.ids[rows[begins_page]]
        self._step_slots.append(self.memory.extend_running(rows, positions, ids))

    def cut(self, row: int, kv_len: int, before: int) -> None:
        self.memory.cut(row, kv_len, before)

    def inserted(self, request: Request, inserted: Inserted, since: int) -> None:
        self.memory.leave(request.row, inserted.handle, inserted.length, since)

    def shared(self, request: Request) -> None:
        self.before_decode(np.array([request.row], dtype=np.int32))

    def released(
        self, request: Request, row: int, num_computed: int, inserted: Inserted | None
    ) -> None:
        # Pages that tails use are not freed.
        self.memory.end(row, num_computed)

    def reset(self) -> None:
        self.memory.reset()
        self._before_rows.clear()
        self._step_slots = []

    def with_slots(self, plan: Plan) -> Plan:
        slots = np.concatenate(self._step_slots)
        self._step_slots = []
        table = None
        if self.memory.writes:
            table = TableWrites(*joined(self.memory.writes))
            self.memory.writes = []
        return replace(plan, window=WindowSlots(slots, table))

    # When memory runs out

    def lacking(self, rows: IntArray, num_tokens: int, num_ahead: int) -> int:
        ahead = np.minimum(self.growth(rows), num_ahead)
        return max(num_tokens, int(ahead.sum())) - self.memory.available

    def freed_tokens(self, request: Request) -> int:
        kv_len = int(self._columns.kv_len[request.row])
        pages = self.memory.pages_of(request.row, kv_len)
        num_alone = int(np.count_nonzero(self.memory.pool.owned[pages] == 1))
        return num_alone * self.page_size

    def resume_states(self, block_len: int) -> WindowResumeStates:
        return WindowResumeStates(self.memory, block_len)


class WindowLedger(GroupLedger):
    pool = WINDOWS

    def __init__(self, memory: WindowGroup, columns: Columns) -> None:
        self._memory = memory
        self._columns = columns

    def usage(self) -> dict[str, int]:
        memory = self._memory
        page_size = memory.page_size
        return {
            "kv_window_tokens": memory.capacity,
            "kv_window_used": memory.pool.num_owned * page_size,
            "kv_window_evictable": memory.pool.evictable_pages * page_size,
            "total_evicted_window_tokens": memory.tails.total_evicted_pages * page_size,
        }

    @property
    def imbalance(self) -> int:
        return self._memory.pool.imbalance

    def audit(self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]) -> None:
        audit_windows(self._memory, self._owned_by(requests, in_use))

    def find_faults(
        self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]
    ) -> list[Fault]:
        return find_window_faults(self._memory, self._owned_by(requests, in_use))

    def quarantine(self, faults: Sequence[Fault], in_use: Sequence[ResumeStateInUse]) -> None:
        for fault in faults:
            self._memory.pool.allocator.quarantine(fault.page, is_owned=fault.is_owned)
        # A row in use has at least one token.
        rows = np.flatnonzero(self._columns.seq_len).astype(np.int32)
        apart = [resume_state.indices for resume_state in in_use]
        self._memory.recount(rows, self._columns.kv_len[rows], apart)

    def last_owner(self, fault: Fault) -> int:
        return int(self._memory.pool.allocator.last_owner[fault.page])

    def _owned_by(
        self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]
    ) -> dict[str, IntArray]:
        """The pages that each request and each resume state in use holds."""
        by_name = {name: self._pages_of(request) for name, request in requests.items()}
        for resume_state in in_use:
            by_name[resume_state.name] = resume_state.indices
        return by_name

    def _pages_of(self, request: Request) -> IntArray:
        """The pages of windows that a request with a row holds."""
        return self._memory.pages_of(request.row, int(self._columns.kv_len[request.row]))


class WindowBudget(GroupBudget):
    """`taken`: tokens that decoding requests take that join the step; `growth`: tokens by which
    running requests are expected to grow."""

    def __init__(self, layers: WindowedLayers, taken: int, growth: int) -> None:
        self._layers = layers
        self._memory = layers.memory
        self._page_size = layers.page_size
        self._num_taken = taken  # by this step, without what is expected later
        self._offset = taken + growth  # tokens that are reserved, or taken by this step

    @property
    def tokens_left(self) -> int:
        return self._memory.available - self._offset

    def fits(self, request: Request, extend: int, reserve: int, *, is_alone: bool) -> bool:
        in_windows = self._in_windows(extend, reserve)
        if not reserve and is_alone:
            return in_windows <= self.tokens_left
        return in_windows + self._page_size < self.tokens_left

    def take(self, request: Request, extend: int, reserve: int) -> None:
        charged = self._pages_of(extend)
        # After this step the row frees the pages before its window.
        row_len = request.kv_len + extend
        growth = self._memory.growth_after(row_len)
        self._offset += charged + self._page_size + min(reserve, growth)
        self._num_taken += charged

    def shortage(self, request: Request, extend: int, reserve: int) -> Shortage | None:
        in_windows = self._in_windows(extend, reserve) + self._page_size
        if in_windows < self.tokens_left:
            return None
        return self._shortage(in_windows + 1, self.tokens_left)

    def no_page(self, cur_rem_tokens: int) -> Shortage | None:
        left = self._memory.available - self._num_taken
        if left > cur_rem_tokens:
            return None
        return self._shortage(self._page_size, left)

    def lacking(self, request: Request, extend: int, reserve: int) -> float:
        in_windows = self._in_windows(extend, reserve) + self._page_size
        return in_windows - self.tokens_left

    def _in_windows(self, extend: int, reserve: int) -> int:
        """The largest number of tokens that a request has in its windows at once, while it computes
        `extend` tokens of its prompt and then generates `reserve` more."""
        full_row = self._memory.full_row
        chunk_len = self._layers.chunk_len
        step = extend if chunk_len is None else min(extend, chunk_len)
        own = self._pages_of(extend)
        # While its prompt is computed it has a step besides its window, later only a window.
        in_prefill = min(own, full_row + self._pages_of(step))
        in_decode = min(own + reserve, full_row)
        return max(in_prefill, in_decode)

    def _pages_of(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self._page_size) * self._page_size

    def _shortage(self, needed: int, available: int) -> Shortage:
        free = self._memory.available
        return Shortage(Lack.GROUP, needed, max(available, 0), free, WINDOW_MEMORY)


def group(parts: GroupParts) -> WindowedLayers | None:
    """The layers with windows, if they have pages of their own."""
    settings = parts.settings.windows
    return None if settings is None else WindowedLayers(parts, settings)


GROUP = group
