"""Sends a trace to an engine and notes what comes back. In virtual time it is a simulation; with a
real engine and a real clock the very same run is a measurement.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.arrays import LongArray
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, StepMeter, TrueLengths, VirtualClock
from weft.sim.gaps import Gaps
from weft.sim.trace import Arrival, TokenSource

DoubleArray = NDArray[np.float64]

# Record.state
OPEN = 0
DONE = 1
REFUSED = 2


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when it is that late. An engine without work lets time pass so."""
        ...


class SteppableEngine(Protocol):
    """What is needed of `weft.engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, message: ToEngine) -> FromEngine | None: ...

    def step(self) -> list[FromEngine]: ...


@dataclass
class Record:
    """What became of N requests. Times are those of the run's clock;
    NaN where something never happened.
    """

    sent_s: DoubleArray  # [N] when it arrived
    first_s: DoubleArray  # [N] when its first token was there
    end_s: DoubleArray  # [N]
    prompt_len: LongArray  # [N]
    output_len: LongArray  # [N] tokens that it got
    cached_len: LongArray  # [N] of its prompt, found in the cache
    retractions: LongArray  # [N]
    state: LongArray  # [N] OPEN, DONE or REFUSED
    tenant: LongArray  # [N] number of its tenant
    gaps: Gaps = field(default_factory=Gaps)  # between the tokens of a request
    meter: StepMeter = field(default_factory=StepMeter)
    num_rows: int = 0  # rows that there are
    evicted_tokens: int = 0

    def __len__(self) -> int:
        return len(self.sent_s)

    @property
    def total_s(self) -> float:
        """From the first arrival to the last end."""
        return float(self.end_s.max() - self.sent_s.min())


class Run:
    """One run of a trace. `lengths` is told the true length of each output,
    if somebody wants to know.
    """

    def __init__(
        self,
        engine: SteppableEngine,
        clock: Clock,
        tokens: TokenSource,
        lengths: TrueLengths | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._tokens = tokens
        self._lengths = lengths
        self._columns = _Columns()
        self._gaps = Gaps()
        self._tenants: dict[str, int] = {}
        self._has_sent = False  # since the last step
        self._due: list[tuple[float, int, Arrival]] = []  # heap: next turns whose time is known
        self._parked: dict[
            int, list[tuple[int, Arrival]]
        ] = {}  # next turns, by the request that they wait for

    def play(self, arrivals: Iterable[Arrival]) -> Record:
        """Send everything, and wait for the last token."""
        source = enumerate(arrivals)
        engine = self._engine
        clock = self._clock
        self._began = clock()
        self._pull(source)
        while True:
            next_s = self._send_due(source)
            if engine.has_work or self._has_sent:  # what was refused is told by the next step
                self._has_sent = False
                for message in engine.step():
                    if type(message) is StepOutput:
                        self._take(message)
            elif next_s is not None:
                clock.wait_until(next_s)
            else:
                return self._record()

    def _send_due(self, source: Iterator[tuple[int, Arrival]]) -> float | None:
        """Send what has arrived by now. Returns when the next request does, if that is known."""
        now = self._clock()
        while True:
            waiting_s: float | None = None  # when the next request of the trace comes
            if self._next is not None:
                waiting_s = self._began + self._next[1].time_s
            turn_s: float | None = None  # when the next turn of a chat comes
            if self._due:
                turn_s = self._due[0][0]
            is_turn = turn_s is not None and (waiting_s is None or turn_s <= waiting_s)
            due_s = turn_s if is_turn else waiting_s
            if due_s is None or due_s > now:
                return due_s
            if is_turn:
                self._send(*heapq.heappop(self._due))
            else:
                assert self._next is not None
                number, arrival = self._next
                self._send(due_s, number, arrival)
                self._pull(source)

    def _pull(self, source: Iterator[tuple[int, Arrival]]) -> None:
        """Find the next arrival that waits for no other."""
        for number, arrival in source:
            if arrival.after < 0:
                self._next: tuple[int, Arrival] | None = (number, arrival)
                return
            ended_s = self._columns.ended(arrival.after)
            if ended_s is None:
                self._parked.setdefault(arrival.after, []).append((number, arrival))
            else:
                heapq.heappush(self._due, (ended_s + arrival.time_s, number, arrival))
        self._next = None

    def _send(self, time_s: float, number: int, arrival: Arrival) -> None:
        packed = self._tokens.pack(arrival.prompt)
        prompt_len = len(packed) // 4
        tenant = self._tenants.setdefault(arrival.tenant, len(self._tenants))
        self._columns.enter(number, time_s, prompt_len, tenant)
        if self._lengths is not None:
            self._lengths.add(number, prompt_len + arrival.output_len - 1)
        message = GenerateRequest(
            id=number,
            rid=f"#{number}",
            input_ids=packed,
            sampling=SamplingParams(
                max_new_tokens=arrival.max_new_tokens,
                temperature=0.0,
                seed=number,
                ignore_eos=arrival.ignore_eos,
            ),
            tenant=arrival.tenant,
            priority=arrival.priority,
            cache_salt=arrival.salt,
        )
        self._engine.submit(message)
        self._has_sent = True

    def _take(self, output: StepOutput) -> None:
        now = self._clock()
        columns = self._columns
        if output.ids:
            ids = np.frombuffer(output.ids, dtype=np.int64)
            gaps = now - columns.last_s[ids]
            first = ids[np.isnan(gaps)]
            columns.first_s[first] = now
            columns.last_s[ids] = now
            self._gaps.add(gaps)
        for finish in output.finished:
            columns.finish(finish, now)
            for number, arrival in self._parked.pop(finish.id, ()):
                heapq.heappush(self._due, (now + arrival.time_s, number, arrival))

    def _record(self) -> Record:
        c = self._columns
        n = self._columns.num
        return Record(
            sent_s=c.sent_s[:n],
            first_s=c.first_s[:n],
            end_s=c.end_s[:n],
            prompt_len=c.prompt_len[:n],
            output_len=c.output_len[:n],
            cached_len=c.cached_len[:n],
            retractions=c.retractions[:n],
            state=c.state[:n],
            tenant=c.tenant[:n],
            gaps=self._gaps,
        )


class _Columns:
    """The numbers of all requests so far, by request. Arrays that double when they are full."""

    TIMES = ("sent_s", "first_s", "last_s", "end_s")
    COUNTS = ("prompt_len", "output_len", "cached_len", "retractions", "state", "tenant")

    def __init__(self) -> None:
        self.num = 0  # requests that were entered, and all with lower numbers
        self.sent_s: DoubleArray = np.full(0, np.nan)
        self.first_s: DoubleArray = np.full(0, np.nan)
        self.last_s: DoubleArray = np.full(0, np.nan)
        self.end_s: DoubleArray = np.full(0, np.nan)
        self.prompt_len: LongArray = np.zeros(0, dtype=np.int64)
        self.output_len: LongArray = np.zeros(0, dtype=np.int64)
        self.cached_len: LongArray = np.zeros(0, dtype=np.int64)
        self.retractions: LongArray = np.zeros(0, dtype=np.int64)
        self.state: LongArray = np.zeros(0, dtype=np.int64)
        self.tenant: LongArray = np.zeros(0, dtype=np.int64)

    def enter(self, number: int, sent_s: float, prompt_len: int, tenant: int) -> None:
        if number >= len(self.sent_s):
            self._grow(max(1_024, number + 1))
        self.num = max(self.num, number + 1)
        self.sent_s[number] = sent_s
        self.prompt_len[number] = prompt_len
        self.tenant[number] = tenant

    def finish(self, finish: Finish, now: float) -> None:
        id = finish.id
        self.end_s[id] = now
        self.output_len[id] = finish.completion_tokens
        self.cached_len[id] = finish.cached_tokens
        self.retractions[id] = finish.retractions
        is_refused = finish.reason in ("error", "abort")
        self.state[id] = REFUSED if is_refused else DONE

    def ended(self, number: int) -> float | None:
        if number >= self.num or self.state[number] == OPEN:
            return None
        return float(self.end_s[number])

    def _grow(self, extra: int) -> None:
        size = max(len(self.sent_s), extra)
        for name in self.TIMES:
            times = np.concatenate([getattr(self, name), np.full(size, np.nan)])
            setattr(self, name, times)
        for name in self.COUNTS:
            counts = np.concatenate([getattr(self, name), np.zeros(size, dtype=np.int64)])
            setattr(self, name, counts)


def simulate(
    settings: SchedulerSettings,
    cost: CostModel,
    arrivals: Iterable[Arrival],
    *,
    overlap: bool = True,
) -> Record:
    """Play a trace in virtual time. `settings` have
    `trace.EOS` as their only end-of-sequence token.

    Raises AssertionError if the engine's own checks find a fault.
    """
    clock = VirtualClock()
    lengths = TrueLengths()
    runner = CostRunner(cost, clock, lengths)
    engine = Engine(settings, runner, clock=clock, overlap=overlap, on_failure=_fail)
    record = Run(engine, clock, TokenSource(settings.vocab_size), lengths).play(arrivals)
    record.meter = runner.meter
    record.num_rows = settings.max_running_requests
    stats = engine.scheduler.stats()
    assert not stats.total_faults, (
        "the books of memory did not balance: what was simulated means nothing"
    )
    record.evicted_tokens = stats.total_evicted_tokens
    return record


def _fail(exc: Exception) -> None:
    raise exc
