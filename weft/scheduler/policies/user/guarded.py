"""A wrapper around a user's own policy, which may be wrong: nothing that it raises or returns stops
the server.

From its first fault on, requests go in order of arrival, until a policy is set again; the fault is
reported once (`PolicyContext.report`). The wrapper cannot prevent that a policy takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.observe.survivable import survived
from weft.scheduler.policies.protocol import KeyPolicy, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

T = TypeVar("T")
MAX_TAG = 2**31 - 1


class PolicyFailed(Exception):
    """A user's own policy raised, or returned something that is not an order."""


def guarded(
    name: str,
    kind: type[Policy],
    context: PolicyContext,
) -> Policy:
    """A wrapped new policy of this kind. If its constructor raises, that is its first fault."""
    own_key = issubclass(kind, KeyPolicy) and kind.order is KeyPolicy.order
    return GuardedKey(name, kind, context) if own_key else GuardedPolicy(name, kind, context)


class _Watch:
    """Calls the policy, until its first fault."""

    def __init__(
        self,
        name: str,
        kind: type[Policy],
        context: PolicyContext,
    ) -> None:
        self._name = name
        self._context = context
        self.own: Policy = Policy(context)
        self.is_well = True
        made = self.call(kind, context, otherwise=None)
        if isinstance(made, Policy):
            self.own = made

    def call(self, function: Callable[..., Any], *arguments: object, otherwise: T) -> Any | T:
        """The result of the policy's function; `otherwise` if it raises or had a fault before."""
        if not self.is_well:
            return otherwise
        try:
            return function(*arguments)
        except BaseException as exc:
            cause = survived(exc)
            self.failed(f"raised {type(exc).__name__}: {exc}", cause)
            return otherwise

    def failed(
        self,
        what: str,
        cause: Exception | None = None,
    ) -> None:
        self.is_well = False
        words = f"the policy {self._name} {what}; requests go in the order of arrival"
        fault = PolicyFailed(words)
        fault.__cause__ = cause
        self._context.report(fault)

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        self.call(self.own.use_index, index, counts, otherwise=None)


class GuardedKey(KeyPolicy):
    """The wrapper of a policy that is a number for each request."""

    def __init__(
        self,
        name: str,
        kind: type[Policy],
        context: PolicyContext,
    ) -> None:
        super().__init__(context)
        self._watch = _Watch(name, kind, context)
        own = self._watch.own
        self.reads_cache = bool(own.reads_cache)
        self.ages = bool(own.ages)

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        super().use_index(index, counts)
        self._watch.use_index(index, counts)

    def key(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> DoubleArray:
        watch = self._watch
        own = watch.own
        if watch.is_well and isinstance(own, KeyPolicy):
            key = watch.call(_as_numbers, own, table, indices, now, otherwise=None)
            if key is not None:
                return np.asarray(key)
        return np.zeros(len(indices))


def _as_numbers(
    own: KeyPolicy,
    table: WaitingTable,
    indices: LongArray,
    now: float,
) -> DoubleArray:
    """The key of a policy. Raises ValueError if it is not valid."""
    key = np.asarray(own.key(table, indices, now))
    if key.shape != (len(indices),):
        raise ValueError(f"its key has the shape {key.shape}; ({len(indices)},) is expected")
    if key.dtype.kind not in "biuf":
        raise ValueError(f"its key is of {key.dtype}; numbers are expected")
    numbers: DoubleArray = key.astype(np.float64)
    if np.isnan(numbers).any():
        raise ValueError("its key is NaN for some requests")
    return numbers


class GuardedPolicy(Policy):
    """The wrapper of any other policy."""

    def __init__(
        self,
        name: str,
        kind: type[Policy],
        context: PolicyContext,
    ) -> None:
        super().__init__(context)
        self._watch = _Watch(name, kind, context)
        own = self._watch.own
        self.reads_cache = bool(own.reads_cache)
        self.ages = bool(own.ages)
        self.ages_within = bool(own.ages_within)
        if own.classes is not None:
            self.classes = self
        if own.displacement is not None:
            self.displacement = self
        if own.follower is not None:
            self.follower = self

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        super().use_index(index, counts)
        self._watch.use_index(index, counts)

    def new_counts(self) -> SubtreeCounts | None:
        counts = self._watch.call(self._watch.own.new_counts, otherwise=None)
        return counts if isinstance(counts, SubtreeCounts) else None

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        watch = self._watch
        is_left = table.used.marks(indices)
        own = watch.own
        nobody: Iterator[Request] = iter(())
        order = watch.call(lambda: iter(own.order(table, indices, now)), otherwise=nobody)
        num_named = 0
        while watch.is_well:
            request = watch.call(next, order, None, otherwise=None)
            if request is None:
                break
            if not isinstance(request, Request) or request not in table:
                watch.failed(f"named {type(request).__name__} that does not wait")
                break
            index = table.index_of(request)
            if not is_left[index]:
                watch.failed(f"named {request.message.rid} twice, or where it was not asked")
                break
            is_left[index] = False
            num_named += 1
            yield request
        if watch.is_well and not num_named:
            is_idle = not len(self.context.running.rows)
            if is_idle and len(indices):
                watch.failed("names no request, although nothing runs")
        if not watch.is_well:
            for index in indices[is_left[indices]].tolist():
                yield table.request_at(index)

    # Classes

    def rank(self, request: Request) -> int:
        classes = self._watch.own.classes
        assert classes is not None
        rank = self._watch.call(lambda: int(classes.rank(request)), otherwise=0)
        return int(rank)

    def far_below(
        self,
        waiting: Request,
        rows: IntArray,
    ) -> BoolArray:
        classes = self._watch.own.classes
        assert classes is not None
        nobody: BoolArray = np.zeros(len(rows), dtype=np.bool_)
        below = self._watch.call(classes.far_below, waiting, rows, otherwise=nobody)
        found: BoolArray = np.asarray(below)
        if found.dtype != np.bool_ or found.shape != rows.shape:
            self._watch.failed(f"gave {found.dtype} of the shape {found.shape} for far_below")
            return nobody
        return found

    # Displacement

    def displaced(
        self,
        table: WaitingTable,
        indices: LongArray,
        newcomer: Request,
    ) -> Iterator[Request]:
        """The requests that the policy names, up to the first invalid one."""
        displacement = self._watch.own.displacement
        assert displacement is not None
        watch = self._watch
        is_left = table.used.marks(indices)
        nobody: Iterator[Request] = iter(())
        order = watch.call(
            lambda: iter(displacement.displaced(table, indices, newcomer)), otherwise=nobody
        )
        while True:
            request = watch.call(next, order, None, otherwise=None)
            if not isinstance(request, Request) or request not in table:
                return
            if not is_left[table.index_of(request)]:
                return
            is_left[table.index_of(request)] = False
            yield request

    # Events of requests

    def arrived(self, request: Request) -> int:
        tag = self._tell("arrived", request)
        if tag is None:
            return 0
        if not isinstance(tag, int) or not 0 <= tag <= MAX_TAG:
            self._watch.failed(f"gave {tag!r:.40} as a tag; 0 to {MAX_TAG:,} is expected")
            return 0
        return tag

    def dropped(self, request: Request) -> None:
        self._tell("dropped", request)

    def passed_over(self, request: Request) -> None:
        self._tell("passed_over", request)

    def admitted(self, request: Request) -> None:
        self._tell("admitted", request)

    def left(self, request: Request) -> None:
        self._tell("left", request)

    def _tell(
        self,
        moment: str,
        request: Request,
    ) -> object:
        follower = self._watch.own.follower
        assert follower is not None
        return self._watch.call(lambda: getattr(follower, moment)(request), otherwise=None)
