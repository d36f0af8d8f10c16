"""All services of an engine: the objects that handlers of control requests use and change.

To add a service: a `Service` (`hooks.py`), an attribute of `Services` or of its part with the same
idea, and an index in the order. This is the only module that knows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.engine.adapters import AdapterService
from weft.engine.arrivals import Arrivals
from weft.engine.cache_events import CacheEventService
from weft.engine.core import EngineCore
from weft.engine.deadline_service import DeadlineService
from weft.engine.device_jobs import DeviceJobs
from weft.engine.grammar_service import GrammarService
from weft.engine.handoff.lending import LendService
from weft.engine.handoff.pulling import PullService
from weft.engine.health import HealthChecks
from weft.engine.hooks import Service
from weft.engine.idle import Idle
from weft.engine.input_gate import InputGate
from weft.engine.kv_audit import KvAuditor
from weft.engine.load_report import KvNumbers, LoadReporter
from weft.engine.pause import Pause
from weft.engine.picture.service import Pictures
from weft.engine.pin_service import PinService
from weft.engine.prefill_log import PrefillLog
from weft.engine.session_service import SessionService
from weft.engine.surroundings import Profiler, Surroundings
from weft.engine.tiers.service import TierService
from weft.engine.tool_pauses import ToolPauses
from weft.engine.until_idle import CacheFlushes, EngineShutdown
from weft.messages.status import Stats
from weft.scheduler.features.handoff import LendFeature, PullFeature
from weft.scheduler.features.registry import Features
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings


class Flow:
    """Whether messages come in, whether steps run, and whether the engine ends."""

    def __init__(self, core: EngineCore) -> None:
        self.shutdown = EngineShutdown(core)
        self.pause = Pause(core)
        self.input_gate = InputGate(core)


class Observers:
    """What shows the engine to others; it changes nothing that the scheduler decides.

    `stored`: what counts KV outside of the pool.
    """

    def __init__(
        self,
        core: EngineCore,
        features: Features,
        stored: Sequence[KvNumbers],
        pins: PinService,
        flow: Flow,
        profiler: Profiler,
    ) -> None:
        self.profiler = profiler
        self.health = HealthChecks(core)
        self.kv_auditor = KvAuditor(core)
        self.load = LoadReporter(core, features, stored)
        self.pictures = Pictures(core, features, self.load, pins, flow.pause, flow.input_gate)
        self.prefill_log = PrefillLog(core)

    def in_order(self, followers: Sequence[Service]) -> list[Service]:
        """All that visit steps, with the `followers` of the prefix cache. After a step the first
        one comes last, so that it sees the effects of all others."""
        return [
            self.pictures,
            self.prefill_log,
            *followers,
            self.load,
            self.kv_auditor,
            self.health,
        ]


class Services:
    """`depth`: steps that are planned while another one runs."""

    def __init__(self, settings: SchedulerSettings, around: Surroundings, depth: int) -> None:
        features = Features(settings, around.grammars, around.processors, around.handoff)
        core = EngineCore(Scheduler(settings, features.all), around, depth)
        self.features = features
        self.core = core
        self.sessions = SessionService(core, features.sessions)
        self.grammars = GrammarService(core, features.grammar)
        self.arrivals = Arrivals(core, self.sessions, self.grammars)
        self.tiers: TierService | None = None
        if features.tiers is not None:
            self.tiers = TierService(core, features.tiers, around.tiers)
        pauses = ToolPauses(core, features.tool_pauses, self.tiers)
        self.pins = PinService(core, features.pins, self.tiers, pauses)
        self.handoff = self._handoff(settings, around)
        self.flow = Flow(core)
        self.device_jobs = DeviceJobs(core, around.runner, self.flow.pause)
        self.adapters = AdapterService(core, around.runner, self.device_jobs, features.adapters)
        self.deadlines = DeadlineService(core, features.deadlines, self.grammars)
        self.flushes = CacheFlushes(core, self.tiers)
        blocked: list[Mapping[int, object]] = [features.grammar.queue]
        stored: list[KvNumbers] = []
        if self.tiers is not None:
            blocked.append(self.tiers.feature.waiting)
            stored.append(self.tiers)
        if self.handoff is not None:
            blocked.append(self.handoff.waiting)
            stored.append(self.handoff)
        self.idle = Idle(core, blocked)
        self.observers = Observers(core, features, stored, self.pins, self.flow, around.profiler)
        self._attach(self._followers(around))

    def _followers(self, around: Surroundings) -> list[Service]:
        """The services that publish changes of the prefix cache, if they are published."""
        if not around.cache_events.is_on:
            return []
        return [CacheEventService(self.scheduler.kv.cache, around.cache_events)]

    def _handoff(
        self, settings: SchedulerSettings, around: Surroundings
    ) -> LendService | PullService | None:
        """The service that works with another server, if there is one."""
        feature = self.features.handoff
        if settings.handoff is None or feature is None:
            return None
        if isinstance(feature, LendFeature):
            return LendService(self.core, feature, around.handoff, settings.handoff)
        assert isinstance(feature, PullFeature)
        return PullService(self.core, feature, around.handoff, settings.handoff)

    def _attach(self, followers: Sequence[Service]) -> None:
        """Arrange the services, and attach those that visit every step."""
        hooks = self.core.hooks
        # `before_step` has this order, `after_step` the reverse: the reply of a device job comes
        # first, and the load is counted after all other services have ended requests.
        stored: list[Service] = []
        if self.tiers is not None:
            stored = [self.tiers]
        if self.handoff is not None:
            stored = [*stored, self.handoff]
        hooks.arrange(
            [
                *self.observers.in_order(followers),
                self.sessions,
                self.flushes,
                self.flow.shutdown,
                self.grammars,
                self.adapters,
                self.device_jobs,
                self.flow.input_gate,
                self.flow.pause,
                self.deadlines,  # it knows which grammars are ready, and which requests may begin
                *stored,
                self.pins.pauses,
                self.pins,  # after a step it comes before the store, so that new pins are written
            ]
        )
        hooks.attach(self.observers.load)
        hooks.attach(self.observers.kv_auditor)
        for service in (*stored, *followers):
            hooks.attach(service)
        self.observers.prefill_log.follow_level()

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def clock(self) -> float:
        """Seconds. A journal records each reading."""
        return self.core.clock()

    def stats(self) -> Stats:
        """All current counters and gauges."""
        return self.observers.load.stats()
