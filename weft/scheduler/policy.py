"""In which order waiting requests are looked at: what a policy is, the list of all, and the simple
ones.

To add one: a class here and a line in `POLICIES` (docs/contribute/policy.md shows it; a larger one
may have a file in `policies/`). docs/guides/policies.md tells users which to choose. What goes
before every policy (resumed requests, and those that have waited too long) is in `queue.py`. A
policy knows requests and their numbers, never the queue, the cache or the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import GOLDEN_GAMMA, BoolArray, IntArray, LongArray, splitmix64
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.batch import RunningBatch
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

TURNS = 4  # one of as many admissions is for the oldest request that is overdue


class PolicyContext(NamedTuple):
    """What a policy may read besides the waiting requests."""

    settings: SchedulerSettings
    columns: Columns
    running: RunningBatch


class RequestClasses(Protocol):
    """Classes of requests, for a policy that has several.

    With classes, requests that were retracted do not go before all others but first in their
    class; running requests of a far lower class make room for a waiting one; and memory that runs
    out is taken from the lowest class.
    """

    def rank(self, request: Request) -> int:
        """Class of a request; lower ones go first, and are retracted last."""
        ...

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        """[n] whether the request of each of `rows` [n] may lose its place to a waiting one."""
        ...


class Displacement(Protocol):
    """Who has to go when the queue is full, for a policy that does not refuse the newcomer."""

    def displaced(
        self, table: WaitingTable, indices: IntArray, newcomer: Request
    ) -> Iterator[Request]:
        """Requests at `indices` [n] that go for the newcomer, which is among them, in order."""
        ...


class RequestFollower(Protocol):
    """Hears of the way of each request, for a policy that keeps an account.

        arrived ─┬─ dropped
                 └─ admitted ── left ─┬─ (ended)
                        └──retracted──┘

    A policy that is switched to hears of those that wait, not of those that run.
    """

    def arrived(self, request: Request) -> int:
        """The request begins to wait. Returns its `WaitingTable.tag`."""
        ...

    def dropped(self, request: Request) -> None:
        """It was aborted while it waited. Also follows an `arrived` that raised, at any point."""
        ...

    def passed_over(self, request: Request) -> None:
        """It is the last that `order` gave, and is not ready; the walk over the queue goes on."""
        ...

    def admitted(self, request: Request) -> None:
        """It has got a row."""
        ...

    def left(self, request: Request) -> None:
        """It gives up its row: finished, aborted or retracted."""
        ...


class Policy:
    """An order of the waiting requests that never ran. `key` is enough for most."""

    # Whether waiting long can bring a request to the front. In vain where the order is that of
    # arrival, and not wanted where the policy sees to it by itself.
    ages = True
    reads_cache = False  # whether `WaitingTable.cached_len` is kept true, and `prefix_index`

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        # The optional sides of a policy; see the protocols above.
        self.classes: RequestClasses | None = None
        self.displacement: Displacement | None = None
        self.follower: RequestFollower | None = None
        # Set by the queue, if the policy reads a cache that shares.
        self.prefix_index: PrefixIndex | None = None
        self.subtree_counts: SubtreeCounts | None = None

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> DoubleArray | LongArray:
        """A number [n] for each of `indices` [n]: the lowest goes first, equal ones as they
        came."""
        raise NotImplementedError

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        """The requests at `indices`, best first. Not all of them will be asked for."""
        return table.lowest_first(indices, self.key(table, indices, now))

    def new_counts(self) -> SubtreeCounts | None:
        """A counter of the sequences below each node of the prefix tree, if the policy reads it."""
        return None


class Fcfs(Policy):
    """First come, first served."""

    ages = False

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        return map(table.request_at, indices)


class LongestPrefix(Policy):
    """Longest prefix match first, so that what is cached is used before it is evicted."""

    reads_cache = True

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        return -table.cached_len[indices]


class ShortestPrefill(Policy):
    """Fewest tokens to compute first: the shortest mean wait for a first token."""

    reads_cache = True

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        return table.fill_len[indices] - table.cached_len[indices]


class ResponseRatio(Policy):
    """Highest response ratio next: (time waited + work) / work, with tokens to compute for work."""

    reads_cache = True

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> DoubleArray:
        work = table.fill_len[indices] - table.cached_len[indices]
        return (table.arrival_s[indices] - now) / work


class LongestOutput(Policy):
    """Longest output first (by what the request allows): no long one is alone at a job's end."""

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        return table.fill_len[indices] - table.max_len[indices]


class Random(Policy):
    """An order that depends on the seed and the number of arrival, and on nothing else."""

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        seed = np.uint64(self.context.settings.seed % 2**32 << 32)
        numbers = table.arrival_order[indices].astype(np.uint64) + seed
        return splitmix64(numbers * GOLDEN_GAMMA).view(np.int64)


class DepthFirst(Policy):
    """Depth first through the prefix tree, the branch with most waiting requests first.

    So neighbours run together.
    """

    reads_cache = True

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        if self.prefix_index is None or self.subtree_counts is None:
            yield from map(table.request_at, indices)
            return
        for anchor in self.subtree_counts.heaviest_first():
            for arrival_order in self.prefix_index.ending_at(anchor):
                yield table.by_arrival(arrival_order)

    def new_counts(self) -> SubtreeCounts:
        return SubtreeCounts()


class Static(Policy):
    """Static batching: no request joins a batch that decodes; all wait for its slowest. A
    baseline."""

    ages = False

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        columns = self.context.columns
        rows = self.context.running.rows
        if (columns.kv_len[rows] > columns.prompt_len[rows]).any():
            return iter(())
        return map(table.request_at, indices)


POLICIES: dict[str, type[Policy] | str] = {
    "fcfs": Fcfs,
    "lpm": LongestPrefix,
    "dfs-weight": DepthFirst,
    "shortest-prefill-first": ShortestPrefill,
    "hrrn": ResponseRatio,
    "lof": LongestOutput,
    "random": Random,
    "static": Static,
    "priority": "weft.scheduler.policies.priority:Priority",
    "fair": "weft.scheduler.policies.fair:Fair",
}


class UnknownPolicy(ValueError):
    """There is no policy of that name; the message says which there are."""


def make_policy(name: str, context: PolicyContext) -> Policy:
    found = POLICIES.get(name)
    if found is None:
        raise UnknownPolicy(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        found = getattr(importlib.import_module(module), kind)
    policy: Policy = found(context)
    return policy
