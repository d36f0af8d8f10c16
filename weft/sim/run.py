"""Sends a trace to an engine and records the replies. In virtual time this is a simulation; with a
real engine and a real clock the same run is a measurement."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray, LongArray
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.features.adapters import AdaptersFeature, LoadedAdapter
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, StepCost, StepMeter, TrueLengths, VirtualClock
from weft.sim.encoder import ENCODER_PRESETS, EncoderCost, SimulatedEncoder
from weft.sim.gaps import Gaps
from weft.sim.guesses import script_guesses
from weft.sim.leap import EngineLeaps, Leapt
from weft.sim.outcome import ABORTED, DONE, OPEN, REFUSED, state_of, why_refused
from weft.sim.speed import MachineSpeed
from weft.sim.trace import Arrival, TokenSource

DoubleArray = NDArray[np.float64]
NumberedArrival: TypeAlias = tuple[int, Arrival]  # (index in the trace, arrival)


class Clock(Protocol):
    def __call__(self) -> float:
        """The time in seconds."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when the clock has reached `time_s`. Time passes this way if an engine has no
        work."""
        ...


class SteppableEngine(Protocol):
    """The part of `weft.engine.engine.Engine` that a run uses."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, message: ToEngine) -> FromEngine | None: ...

    def step(self) -> list[FromEngine]: ...


# Wraps the engine of a run: the wrapper may observe the engine, or control its inputs.
Around: TypeAlias = Callable[[Engine, Clock], SteppableEngine]


class Leaps(NamedTuple):
    made: Sequence[Leapt]
    needs_step: bool  # the next step of an engine must be made alone


NO_LEAPS = Leaps((), needs_step=True)


class Target(Protocol):
    """The destination of a trace: an engine, or several behind a router."""

    @property
    def now_s(self) -> float:
        """Requests that arrived up to this time may be sent."""
        ...

    @property
    def outputs_s(self) -> float:
        """The time at which the outputs of the last step were available."""
        ...

    @property
    def has_work(self) -> bool: ...

    def wait_until(self, time_s: float) -> None:
        """Let time pass without work."""
        ...

    def submit(self, message: GenerateRequest, time_s: float) -> None:
        """Send a request that arrived at `time_s`, which is not later than `now_s`."""
        ...

    def abort(self, number: int, time_s: float) -> None:
        """Abort this request, because its client has left at `time_s`."""
        ...

    def step(self) -> list[FromEngine]: ...

    def leap(self, until_s: float, *, is_followed: bool) -> Leaps:
        """Make steps in which each running request gets a token, many at once, up to this time or
        to a step of another kind. `is_followed`: the end of a request may bring another one."""
        ...


class EngineTarget:
    """An engine and its clock. `leaps`: of a simulated engine."""

    def __init__(
        self, engine: SteppableEngine, clock: Clock, leaps: EngineLeaps | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._leaps = leaps
        self._has_sent = False  # since the last step

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def outputs_s(self) -> float:
        return self._clock()

    @property
    def has_work(self) -> bool:
        # The next step's output has a refusal even if the engine has no work.
        return self._engine.has_work or self._has_sent

    def wait_until(self, time_s: float) -> None:
        self._clock.wait_until(time_s)

    def submit(self, message: GenerateRequest, time_s: float) -> None:
        self._engine.submit(message)
        self._has_sent = True

    def abort(self, number: int, time_s: float) -> None:
        self._engine.submit(Abort(ids=(number,)))
        self._has_sent = True

    def step(self) -> list[FromEngine]:
        self._has_sent = False
        return self._engine.step()

    def leap(self, until_s: float, *, is_followed: bool) -> Leaps:
        if self._leaps is None or self._has_sent:
            return NO_LEAPS
        leapt = self._leaps.leap(until_s)
        return NO_LEAPS if leapt is None else Leaps((leapt,), needs_step=False)


@dataclass
class MachineRecord:
    """What the engines of a run did, together."""

    meter: StepMeter = field(default_factory=StepMeter)
    num_rows: int = 0  # number of rows that exist
    busiest: float = 1.0  # of several engines: the largest working time, divided by the mean
    evicted_tokens: int = 0
    num_expected: int = 0  # first tokens whose time was estimated
    num_within: int = 0  # of these, first tokens within the band around the estimate
    encoder_runs: int = 0
    encoded_tokens: int = 0
    encoder_hits: int = 0  # pictures that were already encoded when a prompt needed them
    encoder_s: float = 0.0  # working time of all encoders together

    def add(self, engine: Engine, encoder: SimulatedEncoder) -> None:
        """Add what a simulated engine and its encoder did."""
        stats = engine.services.stats()
        assert not stats.total_faults, (
            "the books of memory did not balance: what was simulated means nothing"
        )
        calibration = engine.services.deadlines.calibration
        self.evicted_tokens += stats.total_evicted_tokens
        self.num_expected += calibration.num_seen
        self.num_within += calibration.num_within
        self.encoder_runs += encoder.num_runs
        self.encoded_tokens += encoder.num_tokens
        self.encoder_hits += stats.total_encoder_hits
        self.encoder_s += encoder.busy_s


class Labels(NamedTuple):
    """A name for each of N requests."""

    indices: LongArray  # [N] into `names`
    names: list[str]

    def some(self, wanted: BoolArray) -> Labels:
        """Those of the `wanted` [N] requests."""
        return Labels(self.indices[wanted], self.names)


class BackgroundTokens:
    """Counts the tokens of background requests up to the last end of another one."""

    def __init__(self) -> None:
        self.num_output = 0
        self.num_prompt = 0  # of prompts that are computed, or found in the cache
        self._output_now = 0
        self._prompt_now = 0

    def add(self, num_output: int, num_prompt: int) -> None:
        """Background requests got tokens, the first ones after prompts of `num_prompt` tokens."""
        self._output_now += num_output
        self._prompt_now += num_prompt

    def online_ended(self) -> None:
        self.num_output = self._output_now
        self.num_prompt = self._prompt_now


@dataclass
class Record:
    """The outcomes of N requests. Times are those of the run's clock; NaN for events that did not
    happen."""

    sent_s: DoubleArray  # [N] arrival
    first_s: DoubleArray  # [N] first token
    end_s: DoubleArray  # [N] end
    prompt_len: LongArray  # [N]
    output_len: LongArray  # [N] tokens received
    cached_len: LongArray  # [N] cached tokens of its prompt
    retractions: LongArray  # [N]
    state: LongArray  # [N] OPEN, DONE, REFUSED or ABORTED
    tenant: Labels
    reason: Labels  # of those that were refused
    background: BoolArray  # [N] whether it was a background request; never if all of them were
    # Times between the tokens of a request; of background requests only if there are no others.
    gaps: Gaps = field(default_factory=Gaps)
    beside: BackgroundTokens = field(default_factory=BackgroundTokens)
    machine: MachineRecord = field(default_factory=MachineRecord)

    def __len__(self) -> int:
        return len(self.sent_s)

    @property
    def total_s(self) -> float:
        """From the first arrival to the last end."""
        return float(self.end_s.max() - self.sent_s.min())


class Run:
    """One run of a trace. If `lengths` is given, it receives the true length of each output."""

    def __init__(
        self,
        target: Target,
        tokens: TokenSource,
        lengths: TrueLengths | None = None,
    ) -> None:
        self._target = target
        self._tokens = tokens
        self._lengths = lengths
        self._columns = RequestColumns()
        self._gaps = Gaps()
        self._background_gaps = Gaps()
        self._beside = BackgroundTokens()
        self._tenants: dict[str, int] = {}
        self._due: list[tuple[float, int, Arrival]] = []  # heap: next turns whose time is known
        # Next turns, by the request that must end before them.
        self._parked: dict[int, list[NumberedArrival]] = {}
        # Requests whose clients leave early: (time, number).
        self._leaving: list[tuple[float, int]] = []
        self._cut: set[int] = set()  # requests whose outputs end because their clients leave
        # The next request of the trace that does not wait for another one.
        self._next: NumberedArrival | None = None

    def play(self, arrivals: Iterable[Arrival]) -> Record:
        """Send all requests, and wait for the last token."""
        source = enumerate(arrivals)
        target = self._target
        self._began = target.now_s
        self._pull(source)
        while True:
            arrives_s = self._next_arrival_s()
            event_s = min(arrives_s, self._next_leave_s())
            # One event changes what the target has reached.
            if event_s <= target.now_s:
                if arrives_s == event_s:
                    self._send_next(source)
                else:
                    self._leave_next()
            elif target.has_work:
                leaps = target.leap(event_s, is_followed=bool(self._parked))
                for leapt in leaps.made:
                    self._take_all(leapt)
                if not leaps.needs_step:
                    continue
                for message in target.step():
                    if type(message) is StepOutput:
                        self._take(message)
            elif arrives_s < math.inf:
                target.wait_until(arrives_s)
            else:
                return self._record()

    def _next_arrival_s(self) -> float:
        """When the next request arrives of which this is known; infinite if there is none."""
        first_s = math.inf  # the next request of the trace
        if self._next is not None:
            first_s = self._began + self._next[1].time_s
        return min(first_s, self._next_turn_s())

    def _next_turn_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def _next_leave_s(self) -> float:
        """When the next client leaves."""
        return self._leaving[0][0] if self._leaving else math.inf

    def _send_next(self, source: Iterator[NumberedArrival]) -> None:
        """Send the request that arrives next."""
        next_s = self._next_arrival_s()
        if self._next_turn_s() == next_s:
            _, number, arrival = heapq.heappop(self._due)
            self._send(next_s, number, arrival)
            return
        assert self._next is not None
        number, arrival = self._next
        self._send(next_s, number, arrival)
        self._pull(source)

    def _leave_next(self) -> None:
        """Abort the request whose client leaves next, unless it has ended."""
        time_s, number = heapq.heappop(self._leaving)
        if self._columns.ended(number) is None:
            self._target.abort(number, time_s)

    def _pull(self, source: Iterator[NumberedArrival]) -> None:
        """Find the next arrival that does not wait for another request. Park those that do."""
        self._next = None
        for number, arrival in source:
            before = arrival.after
            if before < 0:
                self._next = (number, arrival)
                return
            ended_s = self._columns.ended(before)
            if ended_s is None:
                self._parked.setdefault(before, []).append((number, arrival))
            else:
                # A trace is read as far as its next request; what follows it would come too late,
                # which no figure would show.
                assert ended_s + arrival.time_s >= self._target.now_s, (
                    f"request {number} stands too late in the trace: request {before} has ended"
                )
                self._follow(ended_s, number, arrival)

    def _follow(self, ended_s: float, number: int, arrival: Arrival) -> None:
        """Queue a request whose predecessor has ended: its time counts from that end."""
        heapq.heappush(self._due, (ended_s + arrival.time_s, number, arrival))

    def _send(self, time_s: float, number: int, arrival: Arrival) -> None:
        packed = self._tokens.pack(arrival.prompt)
        prompt_len = len(packed) // 4
        tenant = self._tenants.setdefault(arrival.tenant, len(self._tenants))
        self._columns.enter(number, time_s, prompt_len, tenant, background=arrival.background)
        if self._lengths is not None:
            last_position = prompt_len + arrival.output_len - 1
            self._lengths.add(number, last_position, arrival.output, arrival.guesses)
        if arrival.is_cut:
            self._cut.add(number)
        if arrival.leaves_s < math.inf:
            heapq.heappush(self._leaving, (time_s + arrival.leaves_s, number))
        sampling = SamplingParams(
            max_new_tokens=arrival.max_new_tokens,
            temperature=0.0,
            seed=number,  # the runner identifies the request by it (`cost.py`)
            ignore_eos=arrival.ignore_eos,
        )
        message = GenerateRequest(
            id=number,
            rid=f"#{number}",
            input_ids=packed,
            sampling=sampling,
            tenant=arrival.tenant,
            priority=arrival.priority,
            cache_salt=arrival.salt,
            adapter=arrival.adapter,
            ttft_ms=arrival.ttft_ms,
            timeout_ms=arrival.timeout_ms,
            media=arrival.media,
            background=arrival.background,
        )
        self._target.submit(message, time_s)

    def _take(self, output: StepOutput) -> None:
        now = self._target.outputs_s
        columns = self._columns
        if output.ids:
            ids = np.frombuffer(output.ids, dtype=np.int64)
            gaps = now - columns.last_s[ids]
            is_first = np.isnan(gaps)
            columns.first_s[ids[is_first]] = now
            columns.last_s[ids] = now
            if columns.has_background:
                is_background = columns.background[ids] > 0
                prompt_len = columns.prompt_len[ids[is_first & is_background]]
                self._beside.add(int(np.count_nonzero(is_background)), int(prompt_len.sum()))
                self._background_gaps.add(gaps[is_background])
                gaps = gaps[~is_background]
            self._gaps.add(gaps)
        self._take_ends(output.finished, now)

    def _take_ends(self, finished: Sequence[Finish], now: float) -> None:
        columns = self._columns
        for finish in finished:
            columns.finish(finish, now)
            if self._lengths is not None:
                self._lengths.forget(finish.id)
            if not columns.background[finish.id]:
                self._beside.online_ended()
            if finish.id in self._cut and columns.state[finish.id] == DONE:
                columns.state[finish.id] = ABORTED
            for number, arrival in self._parked.pop(finish.id, ()):
                self._follow(now, number, arrival)

    def _take_all(self, leapt: Leapt) -> None:
        """Take the tokens of steps that were made at once."""
        ids = leapt.ids
        columns = self._columns
        is_background = columns.background[ids] > 0
        gaps = leapt.ended_s[0] - columns.last_s[ids]
        later = np.diff(leapt.ended_s)
        for kept, which in ((self._gaps, ~is_background), (self._background_gaps, is_background)):
            kept.add(gaps[which])
            kept.add(np.repeat(later, np.count_nonzero(which)))
        num_tokens = len(leapt.ended_s) * int(np.count_nonzero(is_background))
        self._beside.add(num_tokens, 0)
        last_s = float(leapt.ended_s[-1])
        columns.last_s[ids] = last_s
        self._take_ends(leapt.finished, last_s)

    def _record(self) -> Record:
        gaps = self._gaps, self._background_gaps
        return self._columns.record(*gaps, list(self._tenants), self._beside)


class RequestColumns:
    """The figures of all requests so far, as arrays by request number. Arrays double when full."""

    TIMES = ("sent_s", "first_s", "last_s", "end_s")
    COUNTS = (
        *("prompt_len", "output_len", "cached_len", "retractions"),
        *("state", "tenant", "reason", "background"),
    )

    def __init__(self) -> None:
        self.num = 0  # highest entered number + 1
        self.sent_s = _never(0)
        self.first_s = _never(0)
        self.last_s = _never(0)
        self.end_s = _never(0)
        self.prompt_len = _none(0)
        self.output_len = _none(0)
        self.cached_len = _none(0)
        self.retractions = _none(0)
        self.state = _none(0)
        self.tenant = _none(0)
        self.reason = _none(0)
        self.background = _none(0)
        self.has_background = False
        self._reasons: dict[str, int] = {}

    def enter(
        self, number: int, sent_s: float, prompt_len: int, tenant: int, *, background: bool = False
    ) -> None:
        if number >= len(self.sent_s):
            self._grow(max(1_024, number + 1))
        self.num = max(self.num, number + 1)
        self.sent_s[number] = sent_s
        self.prompt_len[number] = prompt_len
        self.tenant[number] = tenant
        self.background[number] = background
        self.has_background = self.has_background or background

    def finish(self, finish: Finish, now: float) -> None:
        id = finish.id
        self.end_s[id] = now
        self.output_len[id] = finish.completion_tokens
        self.cached_len[id] = finish.cached_tokens
        self.retractions[id] = finish.retractions
        self.state[id] = state_of(finish)
        if self.state[id] == REFUSED:
            why = why_refused(finish)
            self.reason[id] = self._reasons.setdefault(why, len(self._reasons))

    def record(
        self,
        gaps: Gaps,
        background_gaps: Gaps,
        tenants: list[str],
        beside: BackgroundTokens,
    ) -> Record:
        """The outcomes of all requests; `tenants`: their names, by index. Where all are background
        requests, none counts as one."""
        sent = slice(self.num)
        background = self.background[sent] > 0
        if background.all():
            background[:] = False
            gaps = background_gaps
        return Record(
            sent_s=self.sent_s[sent],
            first_s=self.first_s[sent],
            end_s=self.end_s[sent],
            prompt_len=self.prompt_len[sent],
            output_len=self.output_len[sent],
            cached_len=self.cached_len[sent],
            retractions=self.retractions[sent],
            state=self.state[sent],
            tenant=Labels(self.tenant[sent], tenants),
            reason=Labels(self.reason[sent], list(self._reasons)),
            background=background,
            gaps=gaps,
            beside=beside,
        )

    def ended(self, number: int) -> float | None:
        if number >= self.num or self.state[number] == OPEN:
            return None
        return float(self.end_s[number])

    def _grow(self, extra: int) -> None:
        size = max(len(self.sent_s), extra)
        for name in self.TIMES:
            times = [getattr(self, name), _never(size)]
            setattr(self, name, np.concatenate(times))
        for name in self.COUNTS:
            counts = [getattr(self, name), _none(size)]
            setattr(self, name, np.concatenate(counts))


def _never(num: int) -> DoubleArray:
    """Times of events that have not happened."""
    return np.full(num, np.nan)


def _none(num: int) -> LongArray:
    return np.zeros(num, dtype=np.int64)


def simulate(
    settings: SchedulerSettings,
    cost: StepCost,
    arrivals: Iterable[Arrival],
    *,
    overlap: bool = True,
    around: Around | None = None,
    speed: MachineSpeed | None = None,
    encoder_cost: EncoderCost = ENCODER_PRESETS["gpu"],
    leaps: bool = True,
) -> Record:
    """Run a trace in virtual time. `settings` have `trace.EOS` as their only end-of-sequence token.
    `around` may wrap the engine; `speed` is that of the machine. `leaps`: uniform decode steps are
    made at once, which changes no figure; without overlap only.

    Raises AssertionError if the engine's own checks find a fault.
    """
    clock = VirtualClock()
    lengths = TrueLengths()
    runner = CostRunner(cost, clock, lengths, speed, encoder_cost=encoder_cost)
    engine = Engine(
        settings,
        runner,
        clock=clock,
        overlap=overlap,
        on_failure=fail,
    )
    script_guesses(engine.scheduler, lengths)
    tokens = TokenSource(settings.vocab_size)
    feature = engine.services.adapters.feature
    steppable: SteppableEngine = engine
    engine_leaps = None
    if around is not None:
        steppable = around(engine, clock)
    elif leaps:
        engine_leaps = EngineLeaps(engine, runner, clock, lengths)
    target = EngineTarget(steppable, clock, engine_leaps)
    record = Run(target, tokens, lengths).play(with_adapters([feature], arrivals))
    record.machine.meter = runner.meter
    record.machine.num_rows = settings.max_running_requests
    record.machine.add(engine, runner.encoder)
    return record


def with_adapters(
    features: Sequence[AdaptersFeature], arrivals: Iterable[Arrival]
) -> Iterator[Arrival]:
    """The arrivals. The adapter of each is loaded into every engine before it; loading takes no
    virtual time."""
    for arrival in arrivals:
        if arrival.adapter:
            for feature in features:
                _load(feature, arrival.adapter)
        yield arrival


def _load(feature: AdaptersFeature, uid: str) -> None:
    if uid not in feature.loaded:
        feature.add(LoadedAdapter(uid, len(feature.loaded), uid))


def fail(exc: Exception) -> None:
    raise exc
