"""Policies: the order in which the scheduler looks at waiting requests.

Each module in `kinds/` is a policy, and docs/contribute/policy.md shows how to add one.
docs/guides/policies.md helps users to choose. `waiting/queue.py` puts some requests before every
policy: those that resume, and those that have waited too long. A policy knows requests and their
numbers, but not the queue, the cache or the device. `AgingTurns` lets no policy starve a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.batch import RunningBatch
from weft.scheduler.pace.pace import Pace
from weft.scheduler.policies.lanes.lane import Lane
from weft.scheduler.policies.lanes.lanes import KeptOrder, StableKey, requests_of
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray, WaitingTable

TURNS = 4  # one of this many admissions is for the oldest overdue request


class PolicyContext(NamedTuple):
    """The state that a policy may read besides the waiting requests."""

    settings: SchedulerSettings
    columns: Columns
    running: RunningBatch
    pace: Pace  # what steps cost
    report: Callable[[Exception], None]  # takes the exceptions of a user's own policy


class RequestClasses(Protocol):
    """Classes of requests, for a policy that has several.

    With classes, retracted requests do not go before all others but first in their class; running
    requests of a far lower class are retracted for a waiting one; and when memory runs out, the
    lowest class is retracted first.
    """

    def rank(self, request: Request) -> int:
        """Class of a request; lower ones go first, and are retracted last."""
        ...

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        """[n] whether the requests of `rows` [n] may be retracted for the waiting one."""
        ...


class Displacement(Protocol):
    """The requests to refuse when the queue is full, for a policy that keeps some newcomers."""

    def displaced(
        self, table: WaitingTable, indices: LongArray, newcomer: Request
    ) -> Iterator[Request]:
        """The requests to refuse for the newcomer, in order. `indices` [n] include the newcomer."""
        ...


class RequestFollower(Protocol):
    """Is notified of the events of each request, for a policy that keeps an account.

        arrived ─┬─ dropped
                 └─ admitted ── left ─┬─ (ended)
                        └──retracted──┘

    A policy that is set later is notified of the waiting requests, but not of the running ones.
    """

    def arrived(self, request: Request) -> int:
        """The request begins to wait. Returns its `WaitingTable.tag`."""
        ...

    def dropped(self, request: Request) -> None:
        """The request ended while it waited. Also called after an `arrived` that raised, at any
        point."""
        ...

    def passed_over(self, request: Request) -> None:
        """The last request of `order` is not ready; the walk over the queue goes on."""
        ...

    def admitted(self, request: Request) -> None:
        """The request has got a row."""
        ...

    def left(self, request: Request) -> None:
        """The request releases its row: it is finished, aborted or retracted."""
        ...


class Policy:
    """An order of the waiting requests that never ran. This class orders by arrival."""

    # Whether the queue brings requests that wait long to the front (`aging_s`). Useless in an order
    # of arrival, and not wanted where the policy does it by itself.
    ages = True
    # Whether the policy does it by itself, within groups that one turn for all requests would mix.
    ages_within = False
    # Whether `order_waiting` yields only requests of which the follower was notified.
    yields_followed_only = False
    reads_cache = False  # whether `WaitingTable.cached_len` and `prefix_index` are kept up to date

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        # The optional parts of a policy; see the protocols above.
        self.classes: RequestClasses | None = None
        self.displacement: Displacement | None = None
        self.follower: RequestFollower | None = None
        # From `use_index`.
        self.prefix_index: PrefixIndex | None = None
        self.subtree_counts: SubtreeCounts | None = None

    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        """The requests at `indices` [n], best first. The caller may not read all of them."""
        return map(table.request_at, indices)

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        """The requests whose arrival order is below `end`, best first: the order of `order`,
        perhaps without reading each request."""
        indices = table.used.listed() if end == EVERYBODY else table.indices_before(end)
        return self.order(table, indices, now)

    def look(self, table: WaitingTable) -> None:
        """Requests have come, left or changed, and no order is needed now. A policy that stores an
        order updates it here, so that the next order takes less time."""

    def stable_keys(self) -> tuple[StableKey, ...] | None:
        """The keys of the order, most important first, if they last; None: the order has no keys,
        or one that depends on time."""
        return None

    def lane_keys(self) -> tuple[StableKey, ...] | None:
        """The keys of the lanes that `order_lane` reads; None: it reads no lanes."""
        return self.stable_keys()

    def order_lane(
        self,
        table: WaitingTable,
        lane: Lane,
        as_they_came: Iterator[Request],
        end: int,
        now: float,
    ) -> Iterator[Request]:
        """The requests of a lane whose arrival order is below `end`, best first. The lane is
        ordered by `lane_keys`; `as_they_came` has the same requests in order of arrival."""
        return requests_of(table, lane, end)

    def new_counts(self) -> SubtreeCounts | None:
        """A counter of the sequences below each node of the prefix tree, if the policy reads it."""
        return None

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        """Read the cached prefixes of the waiting requests here from now on. `counts` are those of
        `new_counts`.

        The queue calls it before any request is introduced, if the policy reads the cache and the
        cache shares. A policy with others inside passes both on.
        """
        self.prefix_index = index
        self.subtree_counts = counts


class KeyPolicy(Policy):
    """An order by one number per request, which is enough for most policies."""

    # Whether the number changes only with the columns of its request, and not with time or other
    # state of the policy.
    lasts = False

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._kept: KeptOrder | None = None
        if self.lasts:
            self._kept = KeptOrder((self,))

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray | LongArray:
        """A number for each of `indices` [n]: the lowest goes first, equal ones in order of
        arrival."""
        raise NotImplementedError

    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        return table.lowest_first(indices, self.key(table, indices, now))

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        if self._kept is None:
            return super().order_waiting(table, end, now)
        return self._kept.order(table, end)

    def look(self, table: WaitingTable) -> None:
        if self._kept is not None:
            self._kept.look(table)

    def stable_keys(self) -> tuple[StableKey, ...] | None:
        return (self,) if self.lasts else None


class AgingTurns:
    """Gives every fourth admission to the oldest overdue request, so that no policy starves one.

    From the moment at which a request becomes overdue:

            f f f O f f f O f f f O        f: the policy's next request, O: the oldest overdue one

    A request with k older ones in the queue gets the O of turn k + 1 at the latest, that is, after
    at most TURNS * (k + 1) admissions of requests that never ran, whatever arrives later.
    """

    def __init__(self) -> None:
        self.num_since = 0  # admissions since the last turn of an overdue request
        # ids of the requests to which the last order gave such a turn
        self._turns: set[int] = set()

    def interleave(self, overdue: Iterator[Request], fresh: Iterator[Request]) -> Iterator[Request]:
        """`fresh`, with the next of `overdue`, oldest first, at every fourth position."""
        seen: set[int] = set()
        turns: set[int] = set()
        self._turns = turns
        num_since = self.num_since
        for request in fresh:
            if num_since >= TURNS - 1:
                oldest = _first_unseen(overdue, seen)
                if oldest is not None:
                    seen.add(oldest.id)
                    turns.add(oldest.id)
                    num_since = 0
                    yield oldest
            if request.id not in seen:
                seen.add(request.id)
                num_since += 1
                yield request

    def forget_turns(self) -> None:
        """The next order is made by another policy."""
        self._turns = set()

    def admitted(self, request: Request, *, counts: bool) -> None:
        """A request got a row. `counts`: by the order, and not because it was retracted."""
        if request.id in self._turns:
            self.num_since = 0
        elif counts:
            self.num_since += 1


def _first_unseen(requests: Iterator[Request], seen: set[int]) -> Request | None:
    for request in requests:
        if request.id not in seen:
            return request
    return None
