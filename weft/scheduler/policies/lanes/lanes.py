"""The waiting requests in lanes: one per class or tenant, or one for all, each ordered by keys that
last.

A key lasts if it changes only with the columns of its request. So the cost of an order of 100,000
requests depends only on how many have come, left or changed since the last one. This module knows
the table and keys, but no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Protocol

from weft.arrays import LongArray
from weft.scheduler.policies.lanes.lane import Entry, Lane
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

ONLY_LANE = 0
NEVER = -1
SHARE = 4  # if one in this many requests or more has changed, all are read again


class StableKey(Protocol):
    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray | LongArray:
        """A number [n] for each of `indices` [n], independent of `now`: the lowest goes first."""
        ...


class Lanes:
    """In each lane, requests with equal keys are in order of arrival.

    The method `lane_of` returns the lane numbers [n] of the requests at some indices [n]; None:
    there is one lane. `members` are the arrival orders of the requests that belong to these lanes;
    None: all belong.
    """

    def __init__(
        self,
        keys: Sequence[StableKey],
        lane_of: Callable[[WaitingTable, LongArray], LongArray] | None = None,
        members: Set[int] | None = None,
    ) -> None:
        self._keys = keys
        self._lane_of = lane_of
        self._members = members
        self.lanes: dict[int, Lane] = {}  # lanes with requests
        self._entries_at: dict[int, tuple[int, Entry]] = {}  # lane and entry, by arrival
        # Values of the table at the last update.
        self._num_changes = NEVER
        self._num_repacks = 0

    def update(self, table: WaitingTable) -> set[int]:
        """Update the lanes with the changes of the table. Returns the numbers of the changed
        lanes."""
        before = self._num_changes
        self._num_changes = table.changes.num
        if before == NEVER:
            self._num_repacks = table.changes.num_forgotten
            return self._begin_anew(table)
        arrivals = table.changes.since(before)
        if table.changes.num_forgotten != self._num_repacks:
            self._num_repacks = table.changes.num_forgotten
            arrivals += [one for one in self._entries_at if not table.waits(one)]
        if len(arrivals) * SHARE > len(self._entries_at):
            return self._begin_anew(table)
        return self._move(table, arrivals)

    def of(self, number: int) -> Iterator[Entry]:
        """The entries of a lane, in order."""
        return iter(self.lane(number))

    def lane(self, number: int) -> Lane:
        """A lane; one without requests is empty."""
        return self.lanes.get(number) or Lane()

    def _begin_anew(self, table: WaitingTable) -> set[int]:
        before = set(self.lanes)
        self.lanes = {}
        if self._members is None:
            indices = table.indices()
            arrivals = table.arrival_order[indices].tolist()
        else:
            arrivals = [one for one in self._members if table.waits(one)]
            indices = table.indices_of(arrivals)
        entries_at = self._found(table, indices, arrivals)
        self._entries_at = dict(zip(arrivals, entries_at, strict=True))
        self._add(self._entries_at.values())
        return before.union(self.lanes)

    def _move(self, table: WaitingTable, arrivals: list[int]) -> set[int]:
        """Update the requests that have changed, come or left."""
        touched: set[int] = set()
        staying = []
        for arrival in arrivals:
            if table.waits(arrival) and (self._members is None or arrival in self._members):
                staying.append(arrival)
            elif arrival in self._entries_at:
                touched.add(self._take_out(arrival))
        if not staying:
            return touched
        coming = []
        found = self._found(table, table.indices_of(staying), staying)
        for arrival, entry_at in zip(staying, found, strict=True):
            before = self._entries_at.get(arrival)
            if before == entry_at:
                continue
            if before is not None:
                touched.add(self._take_out(arrival))
            self._entries_at[arrival] = entry_at
            coming.append(entry_at)
            touched.add(entry_at[0])
        self._add(coming)
        return touched

    def _found(
        self, table: WaitingTable, indices: LongArray, arrivals: list[int]
    ) -> Iterator[tuple[int, Entry]]:
        """The lane and the entry of each of `arrivals` [n], which are at `indices` [n]."""
        columns = [one.key(table, indices, 0.0).tolist() for one in self._keys]
        entries = zip(*columns, arrivals, strict=True)
        if self._lane_of is None:
            return ((ONLY_LANE, entry) for entry in entries)
        return zip(self._lane_of(table, indices).tolist(), entries, strict=True)

    def _take_out(self, arrival: int) -> int:
        number, entry = self._entries_at.pop(arrival)
        lane = self.lanes[number]
        lane.remove(entry)
        if not len(lane):
            del self.lanes[number]
        return number

    def _add(self, entries_at: Iterable[tuple[int, Entry]]) -> None:
        new: dict[int, list[Entry]] = {}
        for number, entry in entries_at:
            new.setdefault(number, []).append(entry)
        for number, entries in new.items():
            lane = self.lanes.get(number)
            if lane is None:
                lane = Lane()
                self.lanes[number] = lane
            lane.add(entries)


def requests_of(table: WaitingTable, lane: Lane, end: int) -> Iterator[Request]:
    """The requests of a lane whose arrival order is below `end`, in the lane's order. Lazy."""
    for entry in lane:
        request = table.find(entry[-1])
        if request is not None and entry[-1] < end:
            yield request


class KeptOrder:
    """All waiting requests, in the order of keys that last."""

    def __init__(self, keys: Sequence[StableKey]) -> None:
        self._lanes = Lanes(keys)

    def look(self, table: WaitingTable) -> None:
        """Update the order, so that the next call of `order` has less to do."""
        self._lanes.update(table)

    def order(self, table: WaitingTable, end: int) -> Iterator[Request]:
        """The requests whose arrival order is below `end`, best first. Lazy."""
        self._lanes.update(table)
        return requests_of(table, self._lanes.lane(ONLY_LANE), end)
