"""The waiting queue, and the order in which a pass looks at it.

The queue is a list of lines (`line.py`), one for each class of service: online requests,
and after them background requests, which get what the first line leaves (`background/`). The
second line exists from its first request on. The queue knows requests and policies; it does not
know why a request is admitted, or what runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from weft.arrays import BoolArray, IntArray
from weft.memory.radix.cache import RadixCache
from weft.scheduler.background.opening import BackgroundOpening
from weft.scheduler.policies.protocol import Policy, RequestClasses
from weft.scheduler.request import Request
from weft.scheduler.service import BACKGROUND, ServiceClass
from weft.scheduler.waiting.line import WaitingLine
from weft.scheduler.waiting_table import EVERYBODY


class ArrivalGate:
    """Blocks requests from some arrival on: they stay in the queue, and no pass looks at them."""

    def __init__(self, arrival_order: int, why: str) -> None:
        self.blocked_from = arrival_order  # arrival order of the first blocked request
        self.why = why  # what users read

    def open_until(self, arrival_order: int) -> None:
        """Block only requests from this arrival on. A gate never closes again."""
        self.blocked_from = max(arrival_order, self.blocked_from)

    def lets_pass(self, request: Request) -> bool:
        return request.spec.arrival_order < self.blocked_from


class WaitingQueue:
    """The requests without a row. A request that has waited `aging_s` seconds is overdue; 0: never.

    Features that are off cost nothing: without blocked input there is no gate, and without
    background requests there is one line, whose policy alone has classes.
    """

    def __init__(
        self,
        policy: Policy,
        cache: RadixCache,
        aging_s: float,
        background: BackgroundOpening,
    ) -> None:
        self._cache = cache
        self._aging_s = aging_s
        self.background = background
        self.online = WaitingLine(policy, cache, aging_s)
        self.lines = [self.online]  # in the order in which passes look at them
        self._gate: ArrivalGate | None = None  # exists while the input is blocked

    def __len__(self) -> int:
        return sum(map(len, self.lines))

    def __iter__(self) -> Iterator[Request]:
        """All requests, line by line, in order of arrival; retracted ones before all others."""
        return chain.from_iterable(self.lines)

    def line_of(self, request: Request) -> WaitingLine:
        """The line in which the request waits or would wait. The first background request opens
        their line."""
        index = request.spec.service.line
        if index == len(self.lines):
            self.lines.append(self._new_background())
        return self.lines[index]

    def begin_anew(self, policy: Policy, requests: Iterable[Request]) -> None:
        """Replace all waiting requests by these, the online ones ordered by a policy that has seen
        none of them.

        Reads no state that a fault may have damaged. Blocked requests stay blocked.
        """
        online: list[Request] = []
        background: list[Request] = []
        for request in requests:
            chosen = background if request.spec.service.line else online
            chosen.append(request)
        del self.lines[1:]
        self.online.begin_anew(policy, online)
        if background:
            line = self._new_background()
            line.begin_anew(line.policy, background)
            self.lines.append(line)

    def stop_indexes(self) -> None:
        """Stop notifying the indexes of changes of the cache."""
        for line in self.lines:
            line.cached_lens.stop()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts of all requests that never ran."""
        num_tokens = 0
        for line in self.lines:
            num_tokens += line.num_tokens
        return num_tokens

    def num_before(self, service: ServiceClass) -> int:
        """The waiting requests of this class, and of those before it."""
        return sum(map(len, self.lines[: service.line + 1]))

    @property
    def num_background(self) -> int:
        """The background requests that wait."""
        return len(self) - len(self.online)

    def first_come(self, num: int) -> list[Request]:
        """The first `num` requests, line by line, in order of arrival, retracted ones before all
        others. The policies are not used."""
        found: list[Request] = []
        for line in self.lines:
            found += line.first_come(num - len(found))
        return found

    # Classes

    @property
    def classes(self) -> RequestClasses | None:
        """The classes of all requests; None: all are of one class."""
        return self.online.policy.classes if len(self.lines) == 1 else self

    def rank(self, request: Request) -> int:
        """Class of a request; 0 if there are no classes. Lower ones go first."""
        service = request.spec.service
        classes = self.online.policy.classes
        if service.rank or classes is None:
            return service.rank
        return classes.rank(request)

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        """[n] whether the requests of `rows` [n] may be retracted for the waiting one: background
        requests for every online one, and for no other."""
        is_below: BoolArray = self.online.policy.context.columns.background.take(rows)
        if waiting.spec.service.yields:
            return is_below & False
        classes = self.online.policy.classes
        if classes is None:
            return is_below
        return is_below | classes.far_below(waiting, rows)

    def is_overdue(self, request: Request, now: float) -> bool:
        """Whether the request has waited so long that it goes before its class. No background
        request goes before an online one."""
        if request.spec.service.yields:
            return False
        return 0 < self._aging_s <= now - request.spec.arrival_s

    # Blocking

    def block(self, arrival_order: int, why: str) -> ArrivalGate:
        """Block requests that never ran, from this arrival on.

        A queue that is already blocked keeps its first limit.
        """
        if self._gate is None:
            self._gate = ArrivalGate(arrival_order, why)
        self._gate.why = why
        return self._gate

    def unblock(self) -> None:
        """Look at all requests again. Blocked requests have kept their position."""
        self._gate = None

    def blocked(self) -> Iterator[Request]:
        """The blocked requests, in order of arrival."""
        for request in self.newcomers():
            if self.is_blocked(request):
                yield request

    def newcomers(self) -> Iterator[Request]:
        """The requests that never had a row, in order of arrival."""
        each = (line.newcomers() for line in self.lines)
        return heapq.merge(*each, key=lambda request: request.spec.arrival_order)

    def is_blocked(self, request: Request) -> bool:
        if self._gate is None or self._gate.lets_pass(request):
            return False
        return self.line_of(request).never_ran(request)

    @property
    def gate(self) -> ArrivalGate | None:
        """What blocks requests, those that will arrive, too. None: nothing is blocked."""
        return self._gate

    @property
    def end(self) -> int:
        """Arrival order of the first blocked request."""
        return EVERYBODY if self._gate is None else self._gate.blocked_from

    # The order

    @property
    def next_line(self) -> WaitingLine | None:
        """The first line with a request that is not blocked; None if there is none."""
        end = self.end
        for line in self.lines:
            if line.has_candidates(end):
                return line
        return None

    def order(self, now: float) -> Iterator[Request]:
        """The requests that are not blocked, best first. Lazy: the caller may stop at any request,
        and a line is ordered when it is reached."""
        first = self.online.order(now, self.end)
        if len(self.lines) == 1:
            return first
        later = (line.order(now, self.end) for line in self.lines[1:])
        return chain(first, chain.from_iterable(later))

    # Inside

    def _new_background(self) -> WaitingLine:
        return WaitingLine(self.background.open(), self._cache, BACKGROUND.aging_s or self._aging_s)
