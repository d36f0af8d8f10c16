"""Transfers of pages between KV memory and a store.

        read    reserve pages ─▶ fetch ─▶ land: insert into the tree, free duplicates
        write   lock in the tree ─▶ keep ─▶ unlock

Pages that are being read belong to their transfer alone, until the store says that it is done: the
tree gets only complete pages. Pages that are being written stay in the tree, locked: a locked node
may be split, but none of its pages is freed. Steps that were launched before a transfer may still
read the pages that it reserved, or write the pages that it stores. So a transfer begins after these
steps have ended.

    free + cached + owned by requests + being read + quarantined = all pages

The *ending* of a sequence (`memory/tiers/endings.py`) is transferred with its last block, and has
memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.holders import HeldEnding, Holder
from weft.memory.allocator import NOBODY
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle
from weft.memory.tiers.protocol import Mover
from weft.scheduler.kv import KvMemory
from weft.scheduler.settings import TierSettings

LARGEST_PART = 4  # at most this fraction (1/4) of all pages is being read at a time


class Transfer:
    """Tokens [start, end) of a sequence in transfer between the pool and a store."""

    __slots__ = (
        "behind",
        "end",
        "ending",
        "handle",
        "is_cancelled",
        "is_orphan",
        "is_reading",
        "is_started",
        "key",
        "pages",
        "since_s",
        "start",
    )

    def __init__(
        self,
        key: CacheKey,
        start: int,
        end: int,
        pages: IntArray,
        handle: Handle,
        *,
        behind: int,
        since_s: float,
        is_reading: bool,
    ) -> None:
        self.key = key  # of all tokens up to `end`
        self.start = start
        self.end = end
        # [(end - start) / page_size]; the transfer is the only owner of pages that are being read.
        self.pages = pages
        # locked: the path up to `start` for a read, the whole path for a write
        self.handle = handle
        self.behind = behind  # the last step that was planned before the transfer
        self.since_s = since_s  # when it was requested, or later when it was cancelled
        self.is_reading = is_reading
        self.ending = NO_PAGES  # places of its ending; empty: the ending is not transferred
        self.is_started = False
        self.is_cancelled = False
        self.is_orphan = False  # the tree was emptied since, so there is no handle any more


class Transfers(Holder):
    """The transfers of one memory, by ticket. `mover` moves the pages."""

    def __init__(self, kv: KvMemory, settings: TierSettings, mover: Mover) -> None:
        self._kv = kv
        self._cache = kv.cache
        self._allocator = kv.allocator
        self._page_size = kv.page_size
        self.settings = settings
        self._endings = kv.endings
        self._mover = mover
        self._by_ticket: dict[int, Transfer] = {}  # the oldest first
        self.num_owned = 0  # being read
        self.is_stale = False  # the stored KV may be of other weights
        self._num_tickets = 0
        kv.add_holder(self)

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[int]:
        """The tickets, the oldest first."""
        return iter(list(self._by_ticket))

    def items(self) -> Iterator[tuple[int, Transfer]]:
        """Tickets and transfers, the oldest first. It may be changed while it is walked."""
        return iter(list(self._by_ticket.items()))

    def values(self) -> Iterator[Transfer]:
        return iter(list(self._by_ticket.values()))

    def __getitem__(self, ticket: int) -> Transfer:
        return self._by_ticket[ticket]

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    # Transfers

    def room(self, spare: float) -> int:
        """Tokens that may be read now, as whole blocks. `spare`: tokens of memory that running
        requests do not need."""
        num_pages = self._allocator.num_pages // LARGEST_PART - self.num_owned
        num_tokens = max(int(min(num_pages * self._page_size, spare)), 0)
        return num_tokens - num_tokens % self.settings.block_len

    def resumable(self, key: CacheKey) -> int:
        """Tokens at the beginning of this sequence that a request could use from the cache."""
        return self._endings.resumable(self._cache.match(key))

    def places(self, key: CacheKey) -> list[int]:
        """The lengths, shortest first, at which the cached part of a sequence can be stored so that
        it can be resumed."""
        return self._endings.places(self._cache, key, self.settings.block_len)

    def read(
        self,
        key: CacheKey,
        start: int,
        *,
        step: int,
        now: float,
        ending: IntArray = NO_PAGES,
    ) -> int | None:
        """Reserve pages for the tokens of `key` from `start` on, where its cached part ends, and
        begin to read them, with the `ending` whose places are reserved. Returns the ticket; None if
        memory does not allow it, and then the caller owns the places of the ending again.

        The caller has checked `room`. `step`: the last step that was planned.
        """
        end = len(key.tokens) // TOKEN_BYTES
        num_pages = (end - start) // self._page_size
        before = self._cache.match(CacheKey(key.namespace, key.tokens[: start * TOKEN_BYTES]))
        if before.length != start:
            return None
        self._cache.lock(before.handle)
        # Pinned memory of sessions is not taken.
        if num_pages > self._allocator.num_free + self._cache.evictable_pages:
            self._cache.unlock(before.handle)
            return None
        pages = self._kv.alloc(num_pages, NOBODY)
        self.num_owned += num_pages
        transfer = Transfer(
            key,
            start,
            end,
            pages,
            before.handle,
            behind=step,
            since_s=now,
            is_reading=True,
        )
        transfer.ending = ending
        return self._enter(transfer)

    def write(
        self,
        key: CacheKey,
        start: int,
        *,
        step: int,
        now: float,
        with_ending: bool = False,
    ) -> int:
        """Lock `key`, all of which is cached, and begin to write its tokens from `start` on, and
        its ending if `with_ending`; its length must then be one of `places`. Returns the ticket."""
        end = len(key.tokens) // TOKEN_BYTES
        found = self._cache.match(key)
        assert found.length == end, "what is to be written is not cached"
        self._cache.lock(found.handle)
        transfer = Transfer(
            key,
            start,
            end,
            found.pages[start // self._page_size :],
            found.handle,
            behind=step,
            since_s=now,
            is_reading=False,
        )
        if with_ending:
            transfer.ending = self._endings.hold(found.handle)
        return self._enter(transfer)

    def begin(self, num_done: int) -> None:
        """Begin the transfers that have waited for steps. All steps before step `num_done` have
        ended."""
        for ticket, transfer in self._by_ticket.items():
            if transfer.is_started or transfer.behind >= num_done:
                continue
            transfer.is_started = True
            # A `Mover` that is not a store takes no ending, and gets none.
            start: Callable[..., None] = self._mover.keep
            if transfer.is_reading:
                start = self._mover.fetch
            places = [transfer.pages]
            if len(transfer.ending):
                places.append(transfer.ending)
            start(ticket, transfer.key, transfer.start, *places)

    def land(self, ticket: int, num_tokens: int, *, has_ending: bool = False) -> int:
        """End a read: insert the tokens that were read into the tree, with the ending if it
        `has_ending`. Returns the number of tokens that are new in the tree, or that requests can
        use for the first time."""
        transfer = self._by_ticket.get(ticket)
        if transfer is None:
            return 0  # it was given up
        del self._by_ticket[ticket]
        self.num_owned -= len(transfer.pages)
        if transfer.is_orphan:
            self._free(transfer)
            return 0
        page_size = self._page_size
        end = transfer.start + num_tokens
        key = CacheKey(transfer.key.namespace, transfer.key.tokens[: end * TOKEN_BYTES])
        # 0 ...... start ...... present ...... end ...... transfer.end
        # | locked   | computed since | new     | not read   |
        before = self._cache.pages_of(transfer.handle)
        inserted = self._cache.insert(key, np.concatenate([before, transfer.pages]))
        num_twice = (inserted.present - transfer.start) // page_size
        num_landed = num_tokens // page_size
        self._allocator.free(transfer.pages[:num_twice])
        self._allocator.free(transfer.pages[num_landed:])
        self._kv.landed(transfer.pages[num_twice:num_landed])
        num_new = end - inserted.present
        if len(transfer.ending) and has_ending and end == transfer.end:
            num_new = end - self.resumable(key)
            self._endings.arrived(inserted.handle, end, transfer.ending)
        elif len(transfer.ending):
            self._endings.memory.give_back(transfer.ending)
        self._cache.unlock(transfer.handle)
        return num_new

    def written(self, ticket: int) -> None:
        """End a write."""
        transfer = self._by_ticket.pop(ticket, None)
        if transfer is not None:
            self._let_go(transfer)

    def cancel(self, ticket: int, now: float) -> None:
        """Ask the store to end a transfer; a write ends at once."""
        transfer = self._by_ticket[ticket]
        if transfer.is_reading:
            self._cancel_read(ticket, transfer, now)
        else:
            self._cancel_write(ticket, transfer)

    def cancel_writes(self) -> None:
        """End all writes now."""
        for ticket, transfer in self.items():
            if not transfer.is_reading:
                self._cancel_write(ticket, transfer)

    def give_up(self, ticket: int) -> None:
        """The store does not answer about a read: quarantine its pages."""
        transfer = self._by_ticket.pop(ticket)
        self.num_owned -= len(transfer.pages)
        for page in transfer.pages.tolist():
            self._allocator.quarantine(page, is_owned=False)
        if len(transfer.ending):
            self._endings.memory.lose(transfer.ending)
        if not transfer.is_orphan:
            self._cache.unlock(transfer.handle)

    @property
    def writing(self) -> int | None:
        """The ticket of the oldest write in progress."""
        for ticket, transfer in self._by_ticket.items():
            if not transfer.is_reading:
                return ticket
        return None

    def reading(self, key: CacheKey, start: int) -> int | None:
        """The ticket of a read that includes the block of `key` from `start` on, or its ending."""
        end = (start + self.settings.block_len) * TOKEN_BYTES
        for ticket, transfer in self._by_ticket.items():
            if not transfer.is_reading or transfer.is_cancelled or transfer.is_orphan:
                continue
            if len(transfer.ending) and transfer.key == key:
                return ticket
            if transfer.key.namespace != key.namespace or transfer.start > start:
                continue
            if transfer.end * TOKEN_BYTES >= end and key.tokens[:end] == transfer.key.tokens[:end]:
                return ticket
        return None

    # As a holder of memory

    def reclaim(self) -> bool:
        for ticket, transfer in self.items():
            self.cancel(ticket, transfer.since_s)
        return bool(self._by_ticket)

    def tokens_become_invalid(self) -> None:
        # Nodes that are being written are locked.
        self.cancel_writes()

    def before_emptying(self, why: str) -> None:
        self.cancel_writes()
        for ticket, transfer in self.items():
            if transfer.is_orphan:
                continue
            self._cache.unlock(transfer.handle)
            self._orphan(ticket, transfer)
            if not transfer.is_started:
                self._free(transfer)

    def after_emptying(self) -> None:
        self._mover.flush()

    def before_reset(self, why: str) -> None:
        for ticket, transfer in self.items():
            if transfer.is_reading:
                self._orphan(ticket, transfer)
                continue
            del self._by_ticket[ticket]
            if transfer.is_started:
                self._mover.cancel(ticket)

    def after_reset(self) -> None:
        # All pages are free now, but a thread may still write into the pages of these reads.
        self.num_owned = 0
        for transfer in self._by_ticket.values():
            transfer.pages = self._allocator.withhold(transfer.pages)
            self.num_owned += len(transfer.pages)
            if len(transfer.ending):
                transfer.ending = self._endings.memory.withhold(transfer.ending)

    def weights_changed(self, why: str) -> None:
        self.is_stale = True
        self._mover.renew(why)

    def reopened(self) -> None:
        """The store has been opened for the weights in use."""
        self.is_stale = False

    def owned(self) -> dict[str, IntArray]:
        owned = {}
        for ticket, transfer in self._by_ticket.items():
            if transfer.is_reading:
                owned[f"read {ticket}"] = transfer.pages
        return owned

    def held_endings(self) -> Iterator[HeldEnding]:
        for ticket, transfer in self._by_ticket.items():
            yield HeldEnding(f"transfer {ticket}", transfer.ending, transfer.is_reading)

    # Inside

    def _enter(self, transfer: Transfer) -> int:
        ticket = self._num_tickets
        self._num_tickets += 1
        self._by_ticket[ticket] = transfer
        return ticket

    def _cancel_write(self, ticket: int, transfer: Transfer) -> None:
        del self._by_ticket[ticket]
        if transfer.is_started:
            self._mover.cancel(ticket)
        self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        """Release the nodes and the ending of a write."""
        if len(transfer.ending):
            self._endings.let_go(transfer.handle, transfer.ending)
        self._cache.unlock(transfer.handle)

    def _free(self, transfer: Transfer) -> None:
        """Free the pages that were reserved for a read."""
        self._allocator.free(transfer.pages)
        if len(transfer.ending):
            self._endings.memory.give_back(transfer.ending)

    def _cancel_read(self, ticket: int, transfer: Transfer, now: float) -> None:
        if transfer.is_cancelled:
            return
        if not transfer.is_started:
            del self._by_ticket[ticket]
            self.num_owned -= len(transfer.pages)
            self._free(transfer)
            self._cache.unlock(transfer.handle)
            return
        transfer.is_cancelled = True
        transfer.since_s = now
        self._mover.cancel(ticket)

    def _orphan(self, ticket: int, transfer: Transfer) -> None:
        """The tree has been emptied, so the pages of this read have no position in it any more."""
        transfer.is_orphan = True
        transfer.handle = None
        if not transfer.is_started:
            del self._by_ticket[ticket]
            self.num_owned -= len(transfer.pages)
            return
        if not transfer.is_cancelled:
            transfer.is_cancelled = True
            self._mover.cancel(ticket)
