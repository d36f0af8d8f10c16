"""In which order waiting requests are looked at: what a policy is, the list of all, and the simple ones.

To add one: a class here, or a file in `policies/`, and a line in `POLICIES`. `docs/guides/policies.md` tells users which to
choose. What goes before every policy (resumed requests, and those that have waited too long) is in `queue.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.memory.prefix_cache import TOKEN_BYTES, Handle, PrefixCache
from weft.scheduler.batch import RunningBatch
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

TURNS = 4  # one of so many admissions is for the oldest that is overdue


class PolicyContext(NamedTuple):
    """What a policy may read besides the waiting requests."""

    settings: SchedulerSettings
    columns: Columns
    running: RunningBatch


class Policy:
    """An order of the waiting requests that never ran. Override what is needed; `key` is enough for most.

    Each request takes this way through the hooks: `arrived`, then `dropped`, or `admitted` and `left`, the last two
    again whenever it has been taken back. A policy that is switched to hears of those that wait, not of those that run.
    """

    reads_cache = False  # whether `WaitingTable.cached_len` is kept true
    weighs = False  # whether `weights` are kept
    resumes_first = (
        True  # requests that were taken back go before all others; else `rank` says where
    )
    preempts = False  # whether running requests make room for waiting ones; `far_below` says which
    ages = True  # whether waiting long can bring a request to the front: in vain where the order is that
    # of arrival, and not wanted where the policy sees to it by itself

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.prefix_index: PrefixIndex | None = None  # set if the policy reads a cache that shares
        self.subtree_counts: SubtreeCounts | None = None  # set if it weighs as well

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> DoubleArray | LongArray:
        """A number [n] for each of `lines` [n]: the lowest goes first, equal ones as they came."""
        raise NotImplementedError

    def order(self, waiting: WaitingTable, lines: IntArray, now: float) -> Iterator[Request]:
        """The requests of `lines`, best first. Not all of them will be asked for."""
        return waiting.lowest_first(lines, self.key(waiting, lines, now))

    def rank(self, request: Request) -> int:
        """Class of a request; lower ones go first, and are retracted last."""
        return 0

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        """[n] whether the running `rows` [n] are so far below a waiting request that it may take their place."""
        return np.zeros(len(rows), dtype=np.bool_)

    def displaced(
        self, waiting: WaitingTable, lines: IntArray, newcomer: Request
    ) -> Iterator[Request]:
        """Requests of `lines` [n] that have to go for the newcomer, which is among them, when the queue is full."""
        return iter(())

    def arrived(self, request: Request) -> int:
        """The request begins to wait. Returns its `WaitingTable.tag`."""
        return 0

    def dropped(self, request: Request) -> None:
        """It was aborted while it waited. Also follows an `arrived` that raised, whatever that had done."""

    def passed_over(self, request: Request) -> None:
        """It is the last that `order` has given, and is not ready; the walk over the queue goes on."""

    def admitted(self, request: Request) -> None:
        """It has got a row."""

    def left(self, request: Request) -> None:
        """It gives up its row: finished, aborted or taken back."""


class Fcfs(Policy):
    """First come, first served."""

    ages = False

    def order(self, waiting: WaitingTable, lines: IntArray, now: float) -> Iterator[Request]:
        return map(waiting.at, lines)


class LongestPrefix(Policy):
    """Longest prefix match first, so that what is cached is used before it is evicted."""

    reads_cache = True

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> LongArray:
        return -waiting.cached_len[lines]


class ShortestPrefill(Policy):
    """Fewest tokens to compute first: the shortest mean wait for a first token."""

    reads_cache = True

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> LongArray:
        return waiting.fill_len[lines] - waiting.cached_len[lines]


class ResponseRatio(Policy):
    """Highest response ratio next: (time waited + work) / work, with the tokens to compute for work."""

    reads_cache = True

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> DoubleArray:
        work = waiting.fill_len[lines] - waiting.cached_len[lines]
        return (waiting.arrival_s[lines] - now) / work


class LongestOutput(Policy):
    """Longest output first (by what the request allows): no long one is left alone at the end of a batch job."""

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> LongArray:
        return waiting.fill_len[lines] - waiting.max_len[lines]


class Random(Policy):
    """An order that depends on the seed and on nothing else about the requests but their number."""

    def key(self, waiting: WaitingTable, lines: IntArray, now: float) -> LongArray:
        z = waiting.arrival_order[lines].astype(np.uint64) + np.uint64(
            self.context.settings.seed % 2**32 << 32
        )
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).view(np.int64)


class DepthFirst(Policy):
    """Depth first through the prefix tree, the branch with the most waiting requests first: neighbours run together."""

    reads_cache = True
    weighs = True

    def order(self, waiting: WaitingTable, lines: IntArray, now: float) -> Iterator[Request]:
        if self.prefix_index is None or self.subtree_counts is None:
            return map(waiting.at, lines)
        ends = map(self.prefix_index.ending_at, self.subtree_counts.heaviest_first())
        return (waiting.numbered(number) for numbers in ends for number in numbers)


class Static(Policy):
    """Static batching: nobody joins a batch that decodes; all wait for its slowest request. A baseline."""

    ages = False

    def order(self, waiting: WaitingTable, lines: IntArray, now: float) -> Iterator[Request]:
        columns, rows = self.context.columns, self.context.running.rows
        if (columns.kv_len[rows] > columns.prompt_len[rows]).any():
            return iter(())
        return map(waiting.at, lines)


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


class PrefixSharing:
    """Keeps requests of one batch from computing the same new prefix twice (in-batch prefix caching).

    Two requests would do that if their cached prefixes end at the same place and the tokens after it begin alike. The
    first goes; the others wait for the next pass, in which they find its prefix in the cache. One object per pass.
    """

    MIN_SHARED = 32  # tokens that must be alike for the wait to pay
    MAX_DEFERRED = (
        64  # a pass ends after so many, or it would look at every member of a large family
    )

    def __init__(self, cache: PrefixCache) -> None:
        self._shares = cache.shares
        self._span = max(self.MIN_SHARED, cache.page_size) * TOKEN_BYTES
        self._heads: set[tuple[Handle, bytes]] = set()
        self.num_deferred = 0

    def defers(self, request: Request) -> bool:
        """Whether a request that is picked already computes the beginning of what this one lacks."""
        is_deferred = self._shares and self._head(request, request.reusable_len) in self._heads
        self.num_deferred += is_deferred
        return is_deferred

    def picked(self, request: Request) -> None:
        head = self._head(request, request.fill_len)
        if request.shares_kv and len(head[1]) == self._span:
            self._heads.add(head)

    def _head(self, request: Request, length: int) -> tuple[Handle, bytes]:
        """Where the cached prefix ends, and what comes behind it of the first `length` tokens."""
        start = request.cached_len * TOKEN_BYTES
        return request.handle, request.packed[start : min(start + self._span, length * TOKEN_BYTES)]
