"""Transfers of pages between KV memory and a store.

        read    reserve pages ─▶ fetch ─▶ land: insert into the tree, free duplicates
        write   lock in the tree ─▶ keep ─▶ unlock

Pages that are being read belong to their transfer alone, until the store says that it is done: the
tree gets only complete pages. Pages that are being written stay in the tree, locked: a locked node
may be split, but none of its pages is freed. Steps that were launched before a transfer may still
read the pages that it reserved, or write the pages that it stores. So a transfer begins after these
steps have ended.

    free + cached + owned by requests + being read + quarantined = all pages

The *resume state* of a sequence (`memory/tiers/resume_states.py`) is transferred with its last
block, and has memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.arrays import IntArray
from weft.memory.accounting.holders import Holder, ResumeStateInUse
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import Mover
from weft.scheduler.kv import KvMemory
from weft.scheduler.settings import TierSettings
from weft.scheduler.tiers.memory import TransferMemory
from weft.scheduler.tiers.table import Transfer, TransferTable

LARGEST_PART = 4  # at most this fraction (1/4) of all pages is being read at a time


class Transfers(Holder):
    """The transfers of one memory, by ticket. `mover` moves the pages."""

    def __init__(self, kv: KvMemory, settings: TierSettings, mover: Mover) -> None:
        self._num_pages = kv.allocator.num_pages
        self._page_size = kv.page_size
        self.settings = settings
        self._mover = mover
        self.memory = TransferMemory(kv)
        self.table = TransferTable()
        self.num_owned = 0  # being read
        self.is_stale = False  # the stored KV may be of other weights
        kv.add_holder(self)

    def room(self, spare: float) -> int:
        """Tokens that may be read now, as full blocks. `spare`: tokens of memory that running
        requests do not need."""
        num_pages = self._num_pages // LARGEST_PART - self.num_owned
        num_tokens = max(int(min(num_pages * self._page_size, spare)), 0)
        return num_tokens - num_tokens % self.settings.block_len

    def read(
        self,
        key: CacheKey,
        start: int,
        *,
        step: int,
        now: float,
        resume_state: IntArray = NO_PAGES,
    ) -> int | None:
        """Reserve pages for the tokens of `key` from `start` on, where its cached part ends, and
        begin to read them, with the `resume_state` whose places are reserved. Returns the ticket;
        None if memory does not allow it, and then the caller owns the places of the resume state
        again.

        The caller has checked `room`. `step`: the last step that was planned.
        """
        reserved = self.memory.reserve(key, start)
        if reserved is None:
            return None
        self.num_owned += len(reserved.pages)
        transfer = Transfer(
            key,
            start,
            key.num_tokens,
            reserved.pages,
            reserved.handle,
            planned_step=step,
            since_s=now,
            is_reading=True,
        )
        transfer.resume_state = resume_state
        return self.table.add(transfer)

    def write(
        self,
        key: CacheKey,
        start: int,
        *,
        step: int,
        now: float,
        with_resume_state: bool = False,
    ) -> int:
        """Lock `key`, all of which is cached, and begin to write its tokens from `start` on, and
        its resume state if `with_resume_state`; its length must then be one of `resumable_lengths`.
        Returns the ticket."""
        locked = self.memory.lock(key, start)
        transfer = Transfer(
            key,
            start,
            key.num_tokens,
            locked.pages,
            locked.handle,
            planned_step=step,
            since_s=now,
            is_reading=False,
        )
        if with_resume_state:
            self.memory.hold_resume_state(transfer)
        return self.table.add(transfer)

    def begin(self, num_done: int) -> None:
        """Begin the transfers that have waited for steps. All steps before step `num_done` have
        ended."""
        for ticket, transfer in self.table.items():
            if transfer.is_started or transfer.planned_step >= num_done:
                continue
            transfer.is_started = True
            # A `Mover` that is not a store takes no resume state, and gets none.
            start: Callable[..., None] = self._mover.keep
            if transfer.is_reading:
                start = self._mover.fetch
            indices = [transfer.pages]
            if len(transfer.resume_state):
                indices.append(transfer.resume_state)
            start(ticket, transfer.key, transfer.start, *indices)

    def land(self, ticket: int, num_tokens: int, *, has_resume_state: bool = False) -> int:
        """End a read: insert the tokens that were read into the tree, with the resume state if it
        `has_resume_state`. Returns the number of tokens that are new in the tree, or that requests
        can use for the first time."""
        transfer = self.table.pop(ticket)
        if transfer is None:
            return 0  # it was given up
        self.num_owned -= len(transfer.pages)
        if transfer.is_orphan:
            self.memory.free(transfer)
            return 0
        return self.memory.insert(transfer, num_tokens, has_resume_state=has_resume_state)

    def written(self, ticket: int) -> None:
        """End a write."""
        transfer = self.table.pop(ticket)
        if transfer is not None:
            self.memory.let_go(transfer)

    def cancel(self, ticket: int, now: float) -> None:
        """Ask the store to end a transfer; a write ends at once."""
        transfer = self.table[ticket]
        if transfer.is_reading:
            self._cancel_read(ticket, transfer, now)
        else:
            self._cancel_write(ticket, transfer)

    def cancel_writes(self) -> None:
        """End all writes now."""
        for ticket, transfer in self.table.items():
            if not transfer.is_reading:
                self._cancel_write(ticket, transfer)

    def give_up(self, ticket: int) -> None:
        """The store does not answer about a read: quarantine its pages."""
        transfer = self.table.pop(ticket)
        assert transfer is not None, "a transfer was given up twice"
        self.num_owned -= len(transfer.pages)
        self.memory.quarantine(transfer)
        if not transfer.is_orphan:
            self.memory.unlock(transfer)

    # As a holder of memory

    def reclaim(self) -> bool:
        for ticket, transfer in self.table.items():
            self.cancel(ticket, transfer.since_s)
        return bool(self.table)

    def tokens_become_invalid(self) -> None:
        # Nodes that are being written are locked.
        self.cancel_writes()

    def before_emptying(self, why: str) -> None:
        self.cancel_writes()
        for ticket, transfer in self.table.items():
            if transfer.is_orphan:
                continue
            self.memory.unlock(transfer)
            self._orphan(ticket, transfer)
            if not transfer.is_started:
                self.memory.free(transfer)

    def after_emptying(self) -> None:
        self._mover.flush()

    def before_reset(self, why: str) -> None:
        for ticket, transfer in self.table.items():
            if transfer.is_reading:
                self._orphan(ticket, transfer)
                continue
            self.table.pop(ticket)
            if transfer.is_started:
                self._mover.cancel(ticket)

    def after_reset(self) -> None:
        # All pages are free now, but a thread may still write into the pages of these reads.
        self.num_owned = 0
        for transfer in self.table.values():
            self.memory.withhold(transfer)
            self.num_owned += len(transfer.pages)

    def weights_changed(self, why: str) -> None:
        self.is_stale = True
        self._mover.renew(why)

    def reopened(self) -> None:
        """The store has been opened for the weights in use."""
        self.is_stale = False

    def owned(self) -> dict[str, IntArray]:
        owned = {}
        for ticket, transfer in self.table.items():
            if transfer.is_reading:
                owned[f"read {ticket}"] = transfer.pages
        return owned

    def resume_states_in_use(self) -> Iterator[ResumeStateInUse]:
        for ticket, transfer in self.table.items():
            yield ResumeStateInUse(f"transfer {ticket}", transfer.resume_state, transfer.is_reading)

    # Inside

    def _cancel_write(self, ticket: int, transfer: Transfer) -> None:
        self.table.pop(ticket)
        if transfer.is_started:
            self._mover.cancel(ticket)
        self.memory.let_go(transfer)

    def _cancel_read(self, ticket: int, transfer: Transfer, now: float) -> None:
        if transfer.is_cancelled:
            return
        if not transfer.is_started:
            self.table.pop(ticket)
            self.num_owned -= len(transfer.pages)
            self.memory.free(transfer)
            self.memory.unlock(transfer)
            return
        transfer.is_cancelled = True
        transfer.since_s = now
        self._mover.cancel(ticket)

    def _orphan(self, ticket: int, transfer: Transfer) -> None:
        """The tree has been emptied, so the pages of this read have no position in it any more."""
        transfer.is_orphan = True
        transfer.handle = None
        if not transfer.is_started:
            self.table.pop(ticket)
            self.num_owned -= len(transfer.pages)
            return
        if not transfer.is_cancelled:
            transfer.is_cancelled = True
            self._mover.cancel(ticket)
