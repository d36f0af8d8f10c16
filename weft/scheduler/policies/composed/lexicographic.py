"""A refined order: requests that are equal in a first order go in a second order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policies.lanes.lanes import KeptOrder, StableKey
from weft.scheduler.policies.protocol import KeyPolicy, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import SAMPLE_SIZE, DoubleArray, WaitingTable, chosen, low_border


class LexicographicPolicy(Policy):
    """Orders by the key of `first`; requests with equal keys go in the order of `second`."""

    def __init__(
        self,
        context: PolicyContext,
        first: KeyPolicy,
        second: Policy,
    ) -> None:
        super().__init__(context)
        self._first = first
        self._second = second
        self.reads_cache = first.reads_cache or second.reads_cache
        keys = self.stable_keys()
        self._kept = None if keys is None else KeptOrder(keys)

    def stable_keys(self) -> tuple[StableKey, ...] | None:
        first = self._first.stable_keys()
        second = self._second.stable_keys()
        if first is None or second is None:
            return None
        return first + second

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        if self._kept is None:
            return super().order_waiting(table, end, now)
        return self._kept.order(table, end)

    def look(self, table: WaitingTable) -> None:
        if self._kept is not None:
            self._kept.look(table)

    def use_index(self, index: PrefixIndex, counts: SubtreeCounts | None) -> None:
        super().use_index(index, counts)
        self._second.use_index(index, counts)

    def new_counts(self) -> SubtreeCounts | None:
        return self._second.new_counts()

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        key = self._first.key(table, indices, now)
        while len(indices) > 2 * SAMPLE_SIZE:
            # Few keys are below the border, but all may be equal to it.
            border = low_border(key)
            is_lower = np.flatnonzero(key < border)
            yield from self._groups(table, indices[is_lower], key[is_lower], now)
            yield from self._second.order(table, chosen(indices, key == border), now)
            is_higher = np.flatnonzero(key > border)
            indices = indices[is_higher]
            key = key[is_higher]
        yield from self._groups(table, indices, key, now)

    def _groups(
        self,
        table: WaitingTable,
        indices: LongArray,
        key: DoubleArray | LongArray,
        now: float,
    ) -> Iterator[Request]:
        """Order a few requests: each group of equal keys goes in the second order."""
        if not len(indices):
            return
        sorting = np.argsort(key, kind="stable")
        indices = indices[sorting]
        key = key[sorting]
        borders = np.flatnonzero(key[1:] != key[:-1]) + 1
        for group in np.split(indices, borders):
            if len(group) == 1:
                yield table.request_at(int(group[0]))
            else:
                yield from self._second.order(table, group, now)
