"""KV memory with pages that are being read from a store or written to one.

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

from collections.abc import Callable, Mapping

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import NOBODY, PageAllocator, RowTable
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle, PrefixCache
from weft.memory.tiers.endings import Endings, NoEndings
from weft.memory.tiers.protocol import Mover, NoTiers
from weft.scheduler.kv import OTHER_WEIGHTS, KvMemory
from weft.scheduler.request import Columns, Request
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


class TieredKv(KvMemory):
    """The engine sets `tiers`. `on_landing` is called with the pages that were read."""

    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: PrefixCache,
        columns: Columns,
        settings: TierSettings,
    ) -> None:
        super().__init__(rows, allocator, cache, columns)
        self._begin_transfers(settings, NoEndings())

    def _begin_transfers(self, settings: TierSettings, endings: Endings) -> None:
        self.tiers: Mover = NoTiers()
        self.endings = endings
        self.leases.endings = endings
        self.on_landing: Callable[[IntArray], None] | None = None
        self.settings = settings
        self.transfers: dict[int, Transfer] = {}  # by ticket, the oldest first
        self.num_read_pages = 0  # being read
        self.is_stale = False  # the stored KV may be of other weights
        self._num_tickets = 0

    # Transfers

    def room(self, spare: float) -> int:
        """Tokens that may be read now, as whole blocks. `spare`: tokens of memory that running
        requests do not need."""
        num_pages = self.allocator.num_pages // LARGEST_PART - self.num_read_pages
        num_tokens = max(int(min(num_pages * self.page_size, spare)), 0)
        return num_tokens - num_tokens % self.settings.block_len

    def resumable(self, key: CacheKey) -> int:
        """Tokens at the beginning of this sequence that a request could use from the cache."""
        return self.endings.resumable(self.cache.match(key))

    def places(self, key: CacheKey) -> list[int]:
        """The lengths, shortest first, at which the cached part of a sequence can be stored so that
        it can be resumed."""
        return self.endings.places(self.cache, key, self.settings.block_len)

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
        num_pages = (end - start) // self.page_size
        before = self.cache.match(CacheKey(key.namespace, key.tokens[: start * TOKEN_BYTES]))
        if before.length != start:
            return None
        self.cache.lock(before.handle)
        # Pinned memory of sessions is not taken.
        if num_pages > self.allocator.num_free + self.cache.evictable_pages:
            self.cache.unlock(before.handle)
            return None
        pages = self._alloc(num_pages, NOBODY)
        self.num_read_pages += num_pages
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
        found = self.cache.match(key)
        assert found.length == end, "what is to be written is not cached"
        self.cache.lock(found.handle)
        transfer = Transfer(
            key,
            start,
            end,
            found.pages[start // self.page_size :],
            found.handle,
            behind=step,
            since_s=now,
            is_reading=False,
        )
        if with_ending:
            transfer.ending = self.endings.hold(found.handle)
        return self._enter(transfer)

    def begin(self, num_done: int) -> None:
        """Begin the transfers that have waited for steps. All steps before step `num_done` have
        ended."""
        for ticket, transfer in self.transfers.items():
            if transfer.is_started or transfer.behind >= num_done:
                continue
            transfer.is_started = True
            # A `Mover` that is not a store takes no ending, and gets none.
            start: Callable[..., None] = self.tiers.keep
            if transfer.is_reading:
                start = self.tiers.fetch
            places = [transfer.pages]
            if len(transfer.ending):
                places.append(transfer.ending)
            start(ticket, transfer.key, transfer.start, *places)

    def land(self, ticket: int, num_tokens: int, *, has_ending: bool = False) -> int:
        """End a read: insert the tokens that were read into the tree, with the ending if it
        `has_ending`. Returns the number of tokens that are new in the tree, or that requests can
        use for the first time."""
        transfer = self.transfers.get(ticket)
        if transfer is None:
            return 0  # it was given up
        del self.transfers[ticket]
        self.num_read_pages -= len(transfer.pages)
        if transfer.is_orphan:
            self._free(transfer)
            return 0
        page_size = self.page_size
        end = transfer.start + num_tokens
        key = CacheKey(transfer.key.namespace, transfer.key.tokens[: end * TOKEN_BYTES])
        # 0 ...... start ...... present ...... end ...... transfer.end
        # | locked   | computed since | new     | not read   |
        before = self.cache.pages_of(transfer.handle)
        inserted = self.cache.insert(key, np.concatenate([before, transfer.pages]))
        num_twice = (inserted.present - transfer.start) // page_size
        num_landed = num_tokens // page_size
        self.allocator.free(transfer.pages[:num_twice])
        self.allocator.free(transfer.pages[num_landed:])
        if self.on_landing is not None:
            self.on_landing(transfer.pages[num_twice:num_landed])
        num_new = end - inserted.present
        if len(transfer.ending) and has_ending and end == transfer.end:
            num_new = end - self.resumable(key)
            self.endings.arrived(inserted.handle, end, transfer.ending)
        elif len(transfer.ending):
            self.endings.memory.give_back(transfer.ending)
        self.cache.unlock(transfer.handle)
        return num_new

    def written(self, ticket: int) -> None:
        """End a write."""
        transfer = self.transfers.pop(ticket, None)
        if transfer is not None:
            self._let_go(transfer)

    def cancel(self, ticket: int, now: float) -> None:
        """Ask the store to end a transfer; a write ends at once."""
        transfer = self.transfers[ticket]
        if transfer.is_reading:
            self._cancel_read(ticket, transfer, now)
        else:
            self._cancel_write(ticket, transfer)

    def cancel_writes(self) -> None:
        """End all writes now."""
        for ticket, transfer in list(self.transfers.items()):
            if not transfer.is_reading:
                self._cancel_write(ticket, transfer)

    def give_up(self, ticket: int) -> None:
        """The store does not answer about a read: quarantine its pages."""
        transfer = self.transfers.pop(ticket)
        self.num_read_pages -= len(transfer.pages)
        for page in transfer.pages.tolist():
            self.allocator.quarantine(page, is_owned=False)
        if len(transfer.ending):
            self.endings.memory.lose(transfer.ending)
        if not transfer.is_orphan:
            self.cache.unlock(transfer.handle)

    @property
    def writing(self) -> int | None:
        """The ticket of the oldest write in progress."""
        for ticket, transfer in self.transfers.items():
            if not transfer.is_reading:
                return ticket
        return None

    def reading(self, key: CacheKey, start: int) -> int | None:
        """The ticket of a read that includes the block of `key` from `start` on, or its ending."""
        end = (start + self.settings.block_len) * TOKEN_BYTES
        for ticket, transfer in self.transfers.items():
            if not transfer.is_reading or transfer.is_cancelled or transfer.is_orphan:
                continue
            if len(transfer.ending) and transfer.key == key:
                return ticket
            if transfer.key.namespace != key.namespace or transfer.start > start:
                continue
            if transfer.end * TOKEN_BYTES >= end and key.tokens[:end] == transfer.key.tokens[:end]:
                return ticket
        return None

    # Other events of memory

    def reclaim(self) -> bool:
        for ticket, transfer in list(self.transfers.items()):
            self.cancel(ticket, transfer.since_s)
        is_awaited = super().reclaim()
        return is_awaited or bool(self.transfers)

    def release(self, request: Request, *, keep: bool = True) -> None:
        if not keep:
            # Its computed tokens are invalid, so the tree must be able to drop them.
            self.cancel_writes()
        super().release(request, keep=keep)

    def forget_prefix(self, key: CacheKey, keep: int) -> int:
        # Nodes that are being written are locked.
        self.cancel_writes()
        return super().forget_prefix(key, keep)

    def reset_cache(self) -> None:
        self.cancel_writes()
        for ticket, transfer in list(self.transfers.items()):
            if transfer.is_orphan:
                continue
            self.cache.unlock(transfer.handle)
            self._orphan(ticket, transfer)
            if not transfer.is_started:
                self._free(transfer)
        super().reset_cache()
        self.tiers.flush()

    def reset(self) -> None:
        for ticket, transfer in list(self.transfers.items()):
            if transfer.is_reading:
                self._orphan(ticket, transfer)
                continue
            del self.transfers[ticket]
            if transfer.is_started:
                self.tiers.cancel(ticket)
        super().reset()
        # All pages are free now, but a thread may still write into the pages of these reads.
        self.num_read_pages = 0
        for transfer in self.transfers.values():
            transfer.pages = self.allocator.withhold(transfer.pages)
            self.num_read_pages += len(transfer.pages)
            if len(transfer.ending):
                transfer.ending = self.endings.memory.withhold(transfer.ending)

    def weights_changed(self) -> None:
        super().weights_changed()
        self._renew()

    def weights_reloaded(self) -> None:
        super().weights_reloaded()
        self._renew()

    def reopened(self) -> None:
        """The store has been opened for the weights in use."""
        self.is_stale = False

    # Accounting

    @property
    def num_owned(self) -> int:
        return super().num_owned + self.num_read_pages

    def _owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        owned = super()._owned_by(requests)
        for ticket, transfer in self.transfers.items():
            if transfer.is_reading:
                owned[f"read {ticket}"] = transfer.pages
        return owned

    # Inside

    def _renew(self) -> None:
        self.is_stale = True
        self.tiers.renew(OTHER_WEIGHTS)

    def _enter(self, transfer: Transfer) -> int:
        ticket = self._num_tickets
        self._num_tickets += 1
        self.transfers[ticket] = transfer
        return ticket

    def _cancel_write(self, ticket: int, transfer: Transfer) -> None:
        del self.transfers[ticket]
        if transfer.is_started:
            self.tiers.cancel(ticket)
        self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        """Release the nodes and the ending of a write."""
        if len(transfer.ending):
            self.endings.let_go(transfer.handle, transfer.ending)
        self.cache.unlock(transfer.handle)

    def _free(self, transfer: Transfer) -> None:
        """Free the pages that were reserved for a read."""
        self.allocator.free(transfer.pages)
        if len(transfer.ending):
            self.endings.memory.give_back(transfer.ending)

    def _cancel_read(self, ticket: int, transfer: Transfer, now: float) -> None:
        if transfer.is_cancelled:
            return
        if not transfer.is_started:
            del self.transfers[ticket]
            self.num_read_pages -= len(transfer.pages)
            self._free(transfer)
            self.cache.unlock(transfer.handle)
            return
        transfer.is_cancelled = True
        transfer.since_s = now
        self.tiers.cancel(ticket)

    def _orphan(self, ticket: int, transfer: Transfer) -> None:
        """The tree has been emptied, so the pages of this read have no position in it any more."""
        transfer.is_orphan = True
        transfer.handle = None
        if not transfer.is_started:
            del self.transfers[ticket]
            self.num_read_pages -= len(transfer.pages)
            return
        if not transfer.is_cancelled:
            transfer.is_cancelled = True
            self.tiers.cancel(ticket)
