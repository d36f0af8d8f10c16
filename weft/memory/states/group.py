"""The layers that keep a state as one group: the slot of each row, and the copies of its state.

A slot has the states of all these layers for one sequence. A row reads and writes its own slot in
every step; in its first step it reads the snapshot at the end of its cached prefix, or zeros.
Between tokens it leaves copies of its state at *borders*, multiples of a fixed number of tokens,
and on the last page of a prompt:

    0 ....... border ....... 2 x border ....... 3 x border ... kv_len
                             ^ the last copy, replaced at the next border      ^ the row's own slot

The copies belong to the row until its tokens are in the prefix cache, which then keeps them
(`snapshots.py`). In a step with drafts, a row also leaves a copy before each draft: when it is
known which of them count, one of these copies is its state, and the others are freed (`go_back`). A
row needs its own slot; copies are made only if there is room, perhaps by evicting snapshots that
were not used for long. This module knows rows and numbers of tokens, never a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.pins import Pins
from weft.memory.allocator import NOBODY, PageAllocator
from weft.memory.radix.tree import Node
from weft.memory.states.snapshots import StateSnapshots

NO_SLOT = -1  # in `reads`: a state of zeros; of a row: it has no slot


class WantedCopy(NamedTuple):
    """A copy that a row may leave in a step."""

    row_index: int  # index of the row in the step
    length: int  # number of tokens of its sequence before the copy
    owner: int


class KeptCopy(NamedTuple):
    """A copy that a row has left, and that the cache does not have yet."""

    length: int  # number of tokens of its sequence before the copy
    slot: int


class StateMoves(NamedTuple):
    """The fields of `plan.step.StateSlots`."""

    reads: IntArray  # [R]
    writes: IntArray  # [R]
    kept_rows: IntArray  # [K]
    kept_lens: IntArray  # [K]
    kept_slots: IntArray  # [K]


class StateGroup:
    def __init__(self, *, num_slots: int, num_rows: int, pins: Pins) -> None:
        self.allocator = PageAllocator(num_slots, page_size=1)
        self.snapshots = StateSnapshots(self.allocator)
        self.slots: IntArray = np.full(num_rows, NO_SLOT, dtype=np.int32)  # [row]
        # [row] slot to read in the next step
        self._sources: IntArray = np.full(num_rows, NO_SLOT, dtype=np.int32)
        self._begun: list[Node] = []  # snapshots that rows read in the planned step
        self._kept: dict[int, list[KeptCopy]] = {}  # by row
        self.num_kept = 0  # copies of all rows
        self._undo: dict[int, list[KeptCopy]] = {}  # by row: before each draft of the planned step
        self.num_undo = 0  # of all rows
        self.num_lent = 0  # slots into which states are being read
        self._pins = pins

    # Capacity

    @property
    def capacity(self) -> int:
        """Slots that are not quarantined."""
        return self.allocator.num_pages - len(self.allocator.quarantined)

    @property
    def available(self) -> int:
        """Number of rows that could begin now: all slots except those that rows need or will
        read."""
        return self.allocator.num_free + self.snapshots.num_evictable + self.num_kept

    @property
    def num_rows(self) -> int:
        """Number of rows that have a slot."""
        return int(np.count_nonzero(self.slots != NO_SLOT))

    # Rows

    def begin(self, row: int, snapshot_node: Node | None, owner: int) -> None:
        """Let a row begin after a snapshot that is in use, or without one."""
        slot = self._take(owner)
        self.slots[row] = slot
        if snapshot_node is None:
            self._sources[row] = NO_SLOT
        else:
            self._sources[row] = self.snapshots.slot_of(snapshot_node)
            self._begun.append(snapshot_node)

    def plan(
        self,
        rows: IntArray,
        starts: IntArray,
        wanted: Iterable[WantedCopy],
        undo: Iterable[WantedCopy] = (),
    ) -> StateMoves:
        """The reads, writes and copies of states in a step of `rows` [R] from `starts` [R] on.
        `undo`: copies before drafts, for which `room_for_undo` has made room. Called once for each
        step, after all slots for rows have been taken."""
        reads = self._sources[rows]
        writes = self.slots[rows]
        kept_rows: list[int] = []
        kept_lens: list[int] = []
        kept_slots: list[int] = []
        for row_index, length, owner in undo:
            row = int(rows[row_index])
            before_draft = int(self.allocator.alloc(1, owner)[0])
            self._undo.setdefault(row, []).append(KeptCopy(length, before_draft))
            self.num_undo += 1
            kept_rows.append(row_index)
            kept_lens.append(length - int(starts[row_index]))
            kept_slots.append(before_draft)
        for row_index, length, owner in wanted:
            row = int(rows[row_index])
            start = int(starts[row_index])
            free = self._slot_for_copy(row, start, owner)
            if free is None:
                continue
            self._kept.setdefault(row, []).append(KeptCopy(length, free))
            self.num_kept += 1
            kept_rows.append(row_index)
            kept_lens.append(length - start)
            kept_slots.append(free)
        self._sources[rows] = writes
        # Later steps run after this one, so they may overwrite what it reads.
        for node in self._begun:
            self.snapshots.let_go(node)
        self._begun = []
        return StateMoves(
            reads=reads,
            writes=writes,
            kept_rows=np.array(kept_rows, dtype=np.int32),
            kept_lens=np.array(kept_lens, dtype=np.int32),
            kept_slots=np.array(kept_slots, dtype=np.int32),
        )

    def room_for_undo(self, num_wanted: int) -> int:
        """How many of the wanted copies before drafts have a slot, after evicting snapshots. Half
        of all slots may stay snapshots: a draft saves less than a cached prefix."""
        while self.allocator.num_free < num_wanted and 2 * len(self.snapshots) > self.capacity:
            if not self.snapshots.evict():
                break
        return min(self.allocator.num_free, num_wanted)

    def is_open(self, row: int) -> bool:
        """Whether it is not known yet which drafts of a row's last step count."""
        return row in self._undo

    def go_back(self, row: int, length: int, border: int) -> None:
        """Only the first `length` tokens of a row count. Copies before drafts that were right stay
        with the row if they are at a border of this many tokens; 0: none stay."""
        freed = []
        for copy in self._undo.pop(row, []):
            self.num_undo -= 1
            if copy.length == length:
                freed.append(int(self.slots[row]))
                self.slots[row] = copy.slot
                self._sources[row] = copy.slot
            elif copy.length < length and border and copy.length % border == 0:
                copies = self._kept.setdefault(row, [])
                copies.append(copy)
                self.num_kept += 1
                if len(copies) > 1:
                    freed.append(copies.pop(0).slot)
                    self.num_kept -= 1
            else:
                freed.append(copy.slot)
        self.allocator.free(np.array(freed, dtype=np.int32))

    def take_kept(self, row: int, length: int) -> list[KeptCopy]:
        """The copies of a row up to `length` tokens, for the cache. The caller owns their slots."""
        taken = []
        left = []
        for copy in self._kept.pop(row, []):
            if copy.length <= length:
                taken.append(copy)
            else:
                left.append(copy)
        if left:
            self._kept[row] = left
        self.num_kept -= len(taken)
        return taken

    def take_slot(self, row: int) -> int:
        """The slot of a row that ends, for the cache. The caller owns it."""
        slot = int(self.slots[row])
        self.slots[row] = NO_SLOT
        return slot

    def end(self, row: int) -> None:
        """Free the slots of a row."""
        slots = [copy.slot for copy in self._kept.pop(row, [])]
        self.num_kept -= len(slots)
        undo = [copy.slot for copy in self._undo.pop(row, [])]
        self.num_undo -= len(undo)
        slots += undo
        if self.slots[row] != NO_SLOT:
            slots.append(self.take_slot(row))
        self.allocator.free(np.array(slots, dtype=np.int32))

    # Slots for states that are read from a store

    def lend(self) -> IntArray | None:
        """Reserve a slot [1] for a state that will be read; None if rows need all slots."""
        if self.available < 2:
            return None
        if not self.allocator.num_free:
            self.snapshots.evict()
        if not self.allocator.num_free:
            return None  # pinned snapshots have them
        self.num_lent += 1
        return self.allocator.alloc(1, NOBODY)

    def arrived(self, node: Node, slots: IntArray) -> None:
        """The state of the sequence that ends at `node` has been read."""
        self.num_lent -= len(slots)
        for slot in slots.tolist():
            self.snapshots.put(node, slot)

    def give_back(self, slots: IntArray) -> None:
        """Free slots that `lend` reserved."""
        self.num_lent -= len(slots)
        self.allocator.free(slots)

    def lose(self, slots: IntArray) -> None:
        """Quarantine slots that `lend` reserved: they may still be written."""
        self.num_lent -= len(slots)
        for slot in slots.tolist():
            self.allocator.quarantine(slot, is_owned=False)

    def withhold(self, slots: IntArray) -> IntArray:
        """Reserve the free ones of these slots. Returns them."""
        taken = self.allocator.withhold(slots)
        self.num_lent += len(taken)
        return taken

    def reset(self) -> None:
        """Free all slots. Reads no state that a fault may have damaged."""
        self.snapshots.forget()
        self.allocator.reset()
        self.slots[:] = NO_SLOT
        self._begun = []
        self._kept = {}
        self.num_kept = 0
        self._undo = {}
        self.num_undo = 0
        self.num_lent = 0

    # Accounting

    def owned_by(self, rows: Mapping[str, int]) -> dict[str, IntArray]:
        """The slots that rows own, by the names of their requests."""
        owned = {}
        for name, row in rows.items():
            slots = [copy.slot for copy in self._kept.get(row, [])]
            slots += [copy.slot for copy in self._undo.get(row, [])]
            if self.slots[row] != NO_SLOT:
                slots.append(int(self.slots[row]))
            owned[name] = np.array(slots, dtype=np.int32)
        return owned

    @property
    def imbalance(self) -> int:
        """free + quarantined + snapshots + copies + before drafts + rows + lent - all: slots that
        are counted twice, or, if negative, not at all."""
        allocator = self.allocator
        not_free = len(allocator.quarantined) + len(self.snapshots) + self.num_kept + self.num_rows
        not_free += self.num_lent + self.num_undo
        return allocator.num_free + not_free - allocator.num_pages

    # Inside

    def _take(self, owner: int) -> int:
        """A slot for a row, evicting what is necessary. Admission has made sure that there is
        one."""
        while not self.allocator.num_free:
            if not (self.snapshots.evict() or self._drop_copy() or self._pins.unpin_oldest()):
                break  # the allocator raises an error
        return int(self.allocator.alloc(1, owner)[0])

    def _slot_for_copy(self, row: int, start: int, owner: int) -> int | None:
        """The slot for a copy of a row: that of its oldest copy from before this step, which begins
        at `start`; or else a slot that is free or can be evicted; None if there is none."""
        copies = self._kept.get(row)
        if copies and copies[0].length <= start:
            self.num_kept -= 1
            return copies.pop(0).slot
        if not self.allocator.num_free:
            self.snapshots.evict()
        # A slot in quarantine does not become free when it is evicted.
        if not self.allocator.num_free:
            return None
        return int(self.allocator.alloc(1, owner)[0])

    def _drop_copy(self) -> bool:
        """Free a copy of some row. Returns whether there was one."""
        for row, copies in self._kept.items():
            slot = copies.pop().slot
            if not copies:
                del self._kept[row]
            self.num_kept -= 1
            self.allocator.free(np.array([slot], dtype=np.int32))
            return True
        return False
