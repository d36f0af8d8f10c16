"""Several engines in virtual time, each with its own clock, behind the router of a server with
`--dp-size`.

    arrival ─▶ EngineRouter ─┬─▶ engine 0 ─▶ its clock
                             ├─▶ engine 1 ─▶ its clock
                             └─▶ ...

The engine whose clock is furthest behind steps next. So a request is sent when every busy engine
has reached its arrival time, and an idle engine starts at exactly that time. The router's
information about an engine is as new as the end of that engine's last step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from weft.engine.engine import Engine
from weft.messages.codec import FromEngine
from weft.messages.media import with_digests
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.route.policy import EngineRouter, RoutedRequest
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, StepCost, StepMeter, TrueLengths, VirtualClock
from weft.sim.encoder import ENCODER_PRESETS, EncoderCost
from weft.sim.guesses import script_guesses
from weft.sim.leap import EngineLeaps, Leapt
from weft.sim.run import Record, Run, fail, with_adapters
from weft.sim.trace import Arrival, TokenSource


class SimulatedReplica:
    """An engine, its clock and its device."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: StepCost,
        lengths: TrueLengths,
        overlap: bool,
        encoder_cost: EncoderCost,
    ) -> None:
        self.clock = VirtualClock()
        self.runner = CostRunner(cost, self.clock, lengths, encoder_cost=encoder_cost)
        self.engine = Engine(
            settings,
            self.runner,
            clock=self.clock,
            overlap=overlap,
            on_failure=fail,
        )
        self.leaps = EngineLeaps(self.engine, self.runner, self.clock, lengths)


class Cluster:
    """Several engines as one target of a trace. `leaps`: uniform decode steps of an engine are made
    at once."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        router: EngineRouter,
        *,
        leaps: bool,
    ) -> None:
        self._leaps = leaps
        self._replicas = replicas
        self._router = router
        self._ranks = range(len(replicas))
        self._idle_s = 0.0  # time reached while no engine works
        self._busy: list[tuple[float, int]] = []  # heap of clocks and ranks of busy engines
        self._is_busy = [False] * len(replicas)
        self._unbegun: set[int] = set()  # requests without a first token
        self.outputs_s = 0.0

    @property
    def now_s(self) -> float:
        if self._busy:
            return self._busy[0][0]
        return self._idle_s

    @property
    def has_work(self) -> bool:
        return bool(self._busy)

    def wait_until(self, time_s: float) -> None:
        self._idle_s = max(self._idle_s, time_s)

    def submit(self, message: GenerateRequest, time_s: float) -> None:
        # What background requests get counts up to the last end of another one, on any engine.
        self._leaps = self._leaps and not message.background
        namespace = f"{message.adapter}\x1f{message.cache_salt}"
        routed = RoutedRequest(with_digests(message.input_ids, message.media), namespace)
        rank = self._router.open(message.id, routed, self._ranks)
        self._unbegun.add(message.id)
        replica = self._replicas[rank]
        if not self._is_busy[rank]:
            replica.clock.wait_until(time_s)
            self._queue(rank)
        replica.engine.submit(message)

    def abort(self, number: int) -> None:
        # Engines that do not have the request ignore this.
        for replica, is_busy in zip(self._replicas, self._is_busy, strict=True):
            if is_busy:
                replica.engine.submit(Abort(ids=(number,)))

    def step(self) -> list[FromEngine]:
        """Run one step of the engine that is furthest behind."""
        rank = self._busy[0][1]
        messages = self._replicas[rank].engine.step()
        self._stepped(rank)
        for message in messages:
            if type(message) is StepOutput:
                self._note(message)
        return messages

    def leap(self, until_s: float, *, is_followed: bool) -> Leapt | None:
        # An end on one engine must not bring a request before a time that another one has reached.
        if is_followed or not self._leaps:
            return None
        rank = self._busy[0][1]
        leapt = self._replicas[rank].leaps.leap(until_s)
        if leapt is not None:
            self._stepped(rank)
            self._note_ends(leapt.finished)
        return leapt

    def _stepped(self, rank: int) -> None:
        """The first engine of the heap has made steps."""
        heapq.heappop(self._busy)
        self._is_busy[rank] = False
        replica = self._replicas[rank]
        self.outputs_s = replica.clock.now
        if replica.engine.has_work:
            self._queue(rank)
        else:
            self.wait_until(replica.clock.now)

    def _queue(self, rank: int) -> None:
        self._is_busy[rank] = True
        heapq.heappush(self._busy, (self._replicas[rank].clock.now, rank))

    def _note(self, output: StepOutput) -> None:
        """Report first tokens and ends to the router."""
        if self._unbegun:
            ids = np.frombuffer(output.ids, dtype=np.int64).tolist()
            for id in self._unbegun.intersection(ids):
                self._unbegun.discard(id)
                self._router.began(id)
        self._note_ends(output.finished)

    def _note_ends(self, finished: Sequence[Finish]) -> None:
        for finish in finished:
            self._unbegun.discard(finish.id)
            self._router.ended(finish.id)


def simulate_cluster(
    settings: SchedulerSettings,
    cost: StepCost,
    arrivals: Iterable[Arrival],
    *,
    num_replicas: int,
    method: str,
    overlap: bool = True,
    encoder_cost: EncoderCost = ENCODER_PRESETS["gpu"],
    leaps: bool = True,
) -> Record:
    """Run a trace on `num_replicas` engines with these settings, like `simulate` on one engine.

    `method` is a key of `weft.route.policy.METHODS`.
    """
    lengths = TrueLengths()
    replicas = [
        SimulatedReplica(settings, cost, lengths, overlap, encoder_cost)
        for _ in range(num_replicas)
    ]
    for replica in replicas:
        script_guesses(replica.engine.scheduler, lengths)
    router = EngineRouter(method, num_replicas, settings.num_pages * settings.page_size)
    features = [replica.engine.services.adapters.feature for replica in replicas]
    tokens = TokenSource(settings.vocab_size)
    run = Run(Cluster(replicas, router, leaps=leaps), tokens, lengths)
    record = run.play(with_adapters(features, arrivals))
    meters = [replica.runner.meter for replica in replicas]
    machine = record.machine
    machine.meter = StepMeter.of_all(meters)
    machine.num_rows = settings.max_running_requests
    machine.busiest = max(meter.busy_s for meter in meters) / max(machine.meter.busy_s, 1e-9)
    for replica in replicas:
        machine.add(replica.engine, replica.runner.encoder)
    return record
