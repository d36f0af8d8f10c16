"""In which order the scheduler looks at waiting requests: what a policy is.

Each module in `policies/` is a policy, and docs/contribute/policy.md adds one. Users find in
docs/guides/policies.md which to choose. `queue.py` puts some requests before every policy: those
that resume, and those that have waited too long. A policy knows requests and their numbers, never
the queue, the cache or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.batch import RunningBatch
from weft.scheduler.lanes.lane import Lane
from weft.scheduler.lanes.lanes import KeptOrder, LastingKey, requests_of
from weft.scheduler.pace.pace import Pace
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray, WaitingTable

TURNS = 4  # one of as many admissions is for the oldest request that is overdue


class PolicyContext(NamedTuple):
    """What a policy may read besides the waiting requests."""

    settings: SchedulerSettings
    columns: Columns
    running: RunningBatch
    pace: Pace | None  # what steps cost
    report: Callable[[Exception], None]  # what a policy of one's own has raised


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
        self, table: WaitingTable, indices: LongArray, newcomer: Request
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
    """An order of the waiting requests that never ran. This one is the order of their arrival."""

    # Whether waiting long can bring a request to the front. In vain where the order is that of
    # arrival, and not wanted where the policy sees to it by itself.
    ages = True
    # Whether it sees to that by itself, within parts that one turn for all would mix.
    ages_within = False
    # Whether `order_waiting` names only those that its follower has heard of.
    names_its_own = False
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

    def order(self, table: WaitingTable, indices: LongArray, now: float) -> Iterator[Request]:
        """The requests at `indices` [n], best first. Not all of them will be asked for."""
        return map(table.request_at, indices)

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        """All that came before the arrival with the number `end`, best first: what `order` gives
        for them, perhaps without a look at each."""
        indices = table.indices() if end == EVERYBODY else table.indices_before(end)
        return self.order(table, indices, now)

    def look(self, table: WaitingTable) -> None:
        """Requests have come, left or changed, and nobody is asked for: a policy that keeps them in
        order puts them there now, so that the next order has less to do."""

    def lasting_keys(self) -> tuple[LastingKey, ...] | None:
        """The keys by which it orders, the most important first, if they last; None: it does not
        order by keys, or by one that depends on the time."""
        return None

    def lane_keys(self) -> tuple[LastingKey, ...] | None:
        """The keys of the lanes that `order_lane` reads; None: it reads none."""
        return self.lasting_keys()

    def order_lane(
        self,
        table: WaitingTable,
        lane: Lane,
        as_they_came: Iterator[Request],
        end: int,
        now: float,
    ) -> Iterator[Request]:
        """The requests of a lane that came before the arrival `end`, best first. They stand there
        by `lane_keys`; `as_they_came` names the same."""
        return requests_of(table, lane, end)

    def new_counts(self) -> SubtreeCounts | None:
        """A counter of the sequences below each node of the prefix tree, if the policy reads it."""
        return None

    def lend_index(self, inner: Policy) -> None:
        """Before it is asked for an order: a policy inside this one reads what the queue has set
        here."""
        inner.prefix_index = self.prefix_index
        inner.subtree_counts = self.subtree_counts


class KeyPolicy(Policy):
    """An order by a number for each request. Enough for most policies."""

    # Whether the number changes only with the columns of its request, never with time or with what
    # else the policy knows.
    lasts = False

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._kept: KeptOrder | None = None
        if self.lasts:
            self._kept = KeptOrder((self,))

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray | LongArray:
        """A number [n] for each of `indices` [n]: the lowest goes first, equal ones as they
        came."""
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

    def lasting_keys(self) -> tuple[LastingKey, ...] | None:
        return (self,) if self.lasts else None
