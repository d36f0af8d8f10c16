"""The transfers in progress between memory and a store, by ticket."""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle


class Transfer:
    """Tokens [start, end) of a sequence in transfer between the pool and a store."""

    __slots__ = (
        "end",
        "handle",
        "is_cancelled",
        "is_orphan",
        "is_reading",
        "is_started",
        "key",
        "pages",
        "planned_step",
        "resume_state",
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
        planned_step: int,
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
        self.planned_step = planned_step  # the last step that was planned before the transfer
        self.since_s = since_s  # when it was requested, or later when it was cancelled
        self.is_reading = is_reading
        self.resume_state = NO_PAGES  # slots or pages; empty: it is not transferred
        self.is_started = False
        self.is_cancelled = False
        self.is_orphan = False  # the tree was emptied since, so there is no handle any more


class TransferTable:
    """Walks begin with the oldest transfer, and the table may be changed meanwhile."""

    def __init__(self) -> None:
        self._by_ticket: dict[int, Transfer] = {}  # the oldest first
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[int]:
        """The tickets."""
        return iter(list(self._by_ticket))

    def items(self) -> Iterator[tuple[int, Transfer]]:
        """Tickets and transfers."""
        return iter(list(self._by_ticket.items()))

    def values(self) -> Iterator[Transfer]:
        return iter(list(self._by_ticket.values()))

    def __getitem__(self, ticket: int) -> Transfer:
        return self._by_ticket[ticket]

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    def add(self, transfer: Transfer) -> int:
        """Returns the ticket."""
        ticket = self._num_tickets
        self._num_tickets += 1
        self._by_ticket[ticket] = transfer
        return ticket

    def pop(self, ticket: int) -> Transfer | None:
        """Remove a transfer. None if there is none with this ticket."""
        return self._by_ticket.pop(ticket, None)

    @property
    def writing(self) -> int | None:
        """The ticket of the oldest write."""
        for ticket, transfer in self._by_ticket.items():
            if not transfer.is_reading:
                return ticket
        return None

    def reading(self, key: CacheKey, start: int, block_len: int) -> int | None:
        """The ticket of a read that includes the block of `key` from `start` on, or its resume
        state."""
        end = (start + block_len) * TOKEN_BYTES
        for ticket, transfer in self._by_ticket.items():
            if not transfer.is_reading or transfer.is_cancelled or transfer.is_orphan:
                continue
            if len(transfer.resume_state) and transfer.key == key:
                return ticket
            if transfer.key.namespace != key.namespace or transfer.start > start:
                continue
            if transfer.end * TOKEN_BYTES >= end and key.tokens[:end] == transfer.key.tokens[:end]:
                return ticket
        return None
