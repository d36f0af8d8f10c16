"""The store below host memory, and its transfers: reads that belong to one of ours, and writes that
follow one of ours. Its pages are places in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import NoTiers, Tiers
from weft.tiers.host.blocks import HostBlock
from weft.tiers.host.copier import HostJob


class WriteBelow(NamedTuple):
    """A write of the store below, which follows one of ours."""

    job: HostJob
    num_bytes: int  # that our transfer has copied
    blocks: Sequence[HostBlock]  # that are being written


class ReadBelow(NamedTuple):
    """A read of the store below that has ended."""

    job: HostJob
    num_tokens: int  # that it has read


class StoreBelow:
    def __init__(self, store: Tiers | None) -> None:
        self.store: Tiers = store or NoTiers()
        self.is_there = store is not None
        self._num_tickets = 0
        # By its tickets, which are not ours.
        self._reads: dict[int, HostJob] = {}
        self.writes: dict[int, WriteBelow] = {}

    def read(self, job: HostJob, key: CacheKey, start: int, places: Sequence[IntArray]) -> None:
        ticket = self._new_ticket()
        self._reads[ticket] = job
        self.store.fetch(ticket, key, start, np.concatenate(places))

    def write(self, write: WriteBelow, key: CacheKey, start: int) -> None:
        ticket = self._new_ticket()
        self.writes[ticket] = write
        places = [block.places for block in write.blocks]
        self.store.keep(ticket, key, start, np.concatenate(places))

    def cancel(self, job: HostJob) -> None:
        """Read no more for this transfer."""
        for ticket, other in self._reads.items():
            if other is job:
                self.store.cancel(ticket)

    def take(self) -> tuple[list[ReadBelow], list[WriteBelow]]:
        """What has ended since the last call."""
        news = self.store.take()
        reads = [ReadBelow(self._reads.pop(one.ticket), one.num_tokens) for one in news.landed]
        writes = [self.writes.pop(ticket) for ticket, _ in news.written]
        return reads, writes

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets
