"""Several engines in virtual time, each with its own clock, behind the router of a server with
`--dp-size`.

    arrival ─▶ EngineRouter ─┬─▶ engine 0 ─▶ its clock
                             ├─▶ engine 1 ─▶ its clock
                             └─▶ ...

The engine whose clock is furthest behind steps next. So a request is sent when every busy engine
has reached its arrival time, and an idle engine starts at exactly that time. The router's
information about an engine is as new as the end of that engine's last step.

Steps of uniform decode are foreseen (`leap.py`). The router learns nothing from them before the
last one, so they are made when that one begins, or before a message to that engine.

    engine 0   | decode decode decode end |      waits in the heap for the begin of its last step
    engine 1   | prompt | decode decode ...      a request arrives: only the steps before it
"""

from __future__ import annotations

import heapq
import math
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
from weft.sim.leap import EngineLeaps, Foreseen, Leapt
from weft.sim.run import Leaps, Record, Run, fail, with_adapters
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
        self.foreseen: Foreseen | None = None  # steps that are not made yet
        self.next_s = math.inf  # its entry in the heap of busy engines; infinite: it is idle

    @property
    def is_busy(self) -> bool:
        return self.next_s < math.inf


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
        # Heap of busy engines, by clock, or by the begin of the last foreseen step. Entries that do
        # not have the engine's `next_s` are out of date.
        self._busy: list[tuple[float, int]] = []
        self._ranks_of: dict[int, int] = {}  # of open requests
        self._unbegun: set[int] = set()  # requests without a first token
        self._made: list[Leapt] = []  # since the last call of `leap`
        self.outputs_s = 0.0

    @property
    def now_s(self) -> float:
        return self._busy[0][0] if self._busy else self._idle_s

    @property
    def has_work(self) -> bool:
        return bool(self._busy)

    def wait_until(self, time_s: float) -> None:
        self._idle_s = max(self._idle_s, time_s)

    def submit(self, message: GenerateRequest, time_s: float) -> None:
        if message.background and self._leaps:
            # What background requests get counts up to the last end of another one, on any engine.
            self._leaps = False
            self._catch_up(time_s)
        namespace = f"{message.adapter}\x1f{message.cache_salt}"
        routed = RoutedRequest(with_digests(message.input_ids, message.media), namespace)
        rank = self._router.open(message.id, routed, self._ranks)
        self._unbegun.add(message.id)
        self._ranks_of[message.id] = rank
        replica = self._replicas[rank]
        if replica.is_busy:
            self._make(rank, time_s)
        else:
            replica.clock.wait_until(time_s)
            self._queue(rank, replica.clock.now)
        replica.engine.submit(message)

    def abort(self, number: int, time_s: float) -> None:
        rank = self._ranks_of.get(number)
        if rank is not None:
            self._make(rank, time_s)
            self._replicas[rank].engine.submit(Abort(ids=(number,)))

    def step(self) -> list[FromEngine]:
        """Run one step of the engine that is furthest behind."""
        rank = self._busy[0][1]
        messages = self._replicas[rank].engine.step()
        self._stepped(rank)
        for message in messages:
            if type(message) is StepOutput:
                self._note(message)
        return messages

    def leap(self, until_s: float, *, is_followed: bool) -> Leaps:
        needs_step = not self._leaps
        while not needs_step and self._busy and self.now_s < until_s:
            rank = self._busy[0][1]
            replica = self._replicas[rank]
            if replica.foreseen is not None:
                self._make(rank)
                if is_followed:
                    break  # the end may bring a request before `until_s`
                continue
            replica.foreseen = replica.leaps.foresee()
            if replica.foreseen is None:
                needs_step = True
            else:
                self._queue(rank, replica.foreseen.steps[-1].began_s)
        made = self._made
        self._made = []
        return Leaps(made, needs_step)

    # Inside

    def _catch_up(self, time_s: float) -> None:
        """Make all foreseen steps that begin before this time."""
        for rank in self._ranks:
            self._make(rank, time_s)

    def _make(self, rank: int, until_s: float = math.inf) -> None:
        """Make the steps foreseen of an engine that begin before this time; the rest is
        forgotten."""
        replica = self._replicas[rank]
        foreseen = replica.foreseen
        if foreseen is None:
            return
        replica.foreseen = None
        leapt = replica.leaps.make(foreseen, until_s)
        self._stepped(rank)
        if leapt is not None:
            self._made.append(leapt)
            self._note_ends(leapt.finished)

    def _stepped(self, rank: int) -> None:
        """An engine has made steps, or will make others than it had foreseen."""
        replica = self._replicas[rank]
        now = replica.clock.now
        self.outputs_s = now
        if replica.engine.has_work:
            self._queue(rank, now)
            return
        replica.next_s = math.inf
        self._drop_old_entries()
        self.wait_until(now)

    def _queue(self, rank: int, next_s: float) -> None:
        self._replicas[rank].next_s = next_s
        heapq.heappush(self._busy, (next_s, rank))
        self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        """Let the first entry of the heap be that of a busy engine."""
        busy = self._busy
        while busy and self._replicas[busy[0][1]].next_s != busy[0][0]:
            heapq.heappop(busy)

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
            self._ranks_of.pop(finish.id, None)
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
