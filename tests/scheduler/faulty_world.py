"""An engine under load in which one call of one function raises, and what must hold then.

The load is made of a seed: prompts in chunks, hits in the cache, sessions, retractions, aborts,
deadlines, pauses, other policies, steps that are mixed or not. It is the same whatever function is
watched, so a place that was counted in one run is found in the next.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import weft.memory
import weft.scheduler.policies.kinds
from tests.engine.engine_world import EngineWorld
from tests.faults import Injected
from tests.scheduler.oracle_runner import DeviceFailed, OracleStep
from tests.scheduler.random_worlds import StepSeconds, prediction, random_prompt, with_pictures
from tests.scheduler.world import EOS, VOCAB
from weft.config.media import MediaRules
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import (
    AuditKv,
    BlockInput,
    ContinueGeneration,
    ExplainRequest,
    FlushCache,
    ListRequests,
    PauseGeneration,
    SetPolicy,
    UnblockInput,
)
from weft.messages.media import MediaItem
from weft.messages.requests import Abort
from weft.messages.sessions import CloseSession, OpenSession, SessionParams
from weft.plan.step import Plan
from weft.scheduler.settings import SchedulerSettings, StateSettings, WindowSettings
from weft.scheduler.split.planner import SplitPlanner

NUM_WORLDS = 14
WITH_DRAFTS = {2, 5, 6}  # of the worlds
WITH_PICTURES = {0, 3}
WINDOWED = (8, 9, 10)  # worlds in which layers with windows have pages of their own
STATEFUL = (11, 13)  # worlds in which some layers keep a state
LAYERED = (8, 9)  # worlds in which prefills are split by layers
WITH_BACKGROUND = {2}  # in which half of the requests are background requests
CONTROL: list[ToEngine] = [
    AuditKv(call=2),
    BlockInput(call=2),
    UnblockInput(call=2),
    UnblockInput(call=2),
    PauseGeneration(call=2, mode="retract"),
    PauseGeneration(call=2, mode="in_place"),
    ContinueGeneration(call=2),
    ContinueGeneration(call=2),
    ContinueGeneration(call=2),
    FlushCache(call=2, timeout_s=0.05),
    SetPolicy(call=2, policy="lpm"),
    SetPolicy(call=2, policy="hrrn"),
    SetPolicy(call=2, policy="priority"),
    SetPolicy(call=2, policy="fair"),
    ListRequests(call=2),
    ExplainRequest(call=2, rid="r3"),
    CloseSession(call=2, session_id="s"),
    OpenSession(call=2, session_id="s"),
]
CORE = (
    "scheduler.accounts",
    "scheduler.admission",
    "scheduler.batch",
    "scheduler.limits",
    "scheduler.history",
    "scheduler.kv",
    "scheduler.pace.pace",
    "scheduler.planner",
    "scheduler.policies",
    "scheduler.policies.protocol",
    "scheduler.outbox",
    "scheduler.prefill",
    "scheduler.waiting.queue",
    "scheduler.recovery",
    "scheduler.request",
    "scheduler.retraction",
    "scheduler.scheduler",
    "scheduler.pace.step_cost",
    "scheduler.speculation.planner",
    "scheduler.speculation.sources",
    "scheduler.speculation.speculator",
    "scheduler.speculation.trust",
    "scheduler.split.planner",
    "scheduler.split.prefill",
    "scheduler.groups.kinds.states",
    "scheduler.waiting_table",
    "scheduler.groups.kinds.windows",
    "engine.kv_audit",
)


# These stand around the guard, or are what it asks.
SPARED = {
    "weft.scheduler.scheduler.Scheduler.has_work",
    "weft.scheduler.outbox.Outbox.is_empty",
    "weft.scheduler.outbox.Outbox.take_faults",
    "weft.scheduler.outbox.Outbox.take_output",
}
# What it returns is what is told: where that is lost, nothing can be done.
NEVER_LATE = {"weft.scheduler.scheduler.Scheduler.process_batch_result"}
# All else rests on these: a final word that is not put down is lost, and an end that is not tried.
NEVER_EARLY = {
    "weft.scheduler.outbox.Outbox.attempt",
    "weft.scheduler.outbox.Outbox.finish",
    "weft.scheduler.scheduler.Scheduler.end",
}


class Target(NamedTuple):
    """A function, a method or a property."""

    home: str  # module, and class if it is a method
    name: str

    def __str__(self) -> str:
        return f"{self.home}.{self.name}"


class Fault(NamedTuple):
    """The call number `at` (from 1 on) of a target raises, before it has done anything or when it
    has done all."""

    target: Target
    at: int
    is_late: bool


def drawn_lateness(rng: random.Random, target: Target) -> bool:
    """Whether a fault of this target comes when it has done all; drawn where both are possible."""
    is_late = rng.random() < 0.5
    if str(target) in NEVER_EARLY:
        return True
    return is_late and str(target) not in NEVER_LATE


@cache
def targets() -> tuple[Target, ...]:
    """All public functions, methods and properties of the scheduler's core and of memory."""
    names = [f"weft.{name}" for name in CORE]
    for package in (weft.memory, weft.scheduler.policies.kinds):
        names += [
            one.name
            for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
            if not one.ispkg
        ]
    found: list[Target] = []
    for module_name in names:
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", None) == module_name
            is_alias = getattr(value, "__name__", name) != name  # as `POLICY` is of a class
            if not is_own or is_alias or name.startswith("_"):
                continue
            if inspect.isfunction(value):
                found.append(Target(module_name, name))
            elif inspect.isclass(value) and not getattr(value, "_is_protocol", False):
                members = [
                    (key, member) for key, member in vars(value).items() if not key.startswith("_")
                ]
                found += [
                    Target(f"{module_name}.{name}", key)
                    for key, member in members
                    if isinstance(member, property | staticmethod | classmethod)
                    or inspect.isfunction(member)
                ]
    return tuple(target for target in found if str(target) not in SPARED)


@contextmanager
def replaced(
    target: Target, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put another function in the place of a target, wherever it was imported to."""
    home, _, last = target.home.rpartition(".")
    with ExitStack() as stack:
        if last[0].isupper():
            owner = getattr(importlib.import_module(home), last)
            before = vars(owner)[target.name]
            after: Any
            if isinstance(before, property):
                assert before.fget is not None
                after = property(wrap(before.fget), before.fset)
            elif isinstance(before, staticmethod | classmethod):
                after = type(before)(wrap(before.__func__))
            else:
                after = wrap(before)
            setattr(owner, target.name, after)
            stack.callback(setattr, owner, target.name, before)
        else:
            function = getattr(importlib.import_module(target.home), target.name)
            wrapped = wrap(function)
            for module in _loaded(len(sys.modules)):
                if vars(module).get(target.name) is function:
                    setattr(module, target.name, wrapped)
                    stack.callback(setattr, module, target.name, function)
        yield


@cache
def _loaded(num_modules: int) -> list[Any]:
    """The modules of the core; `num_modules` are loaded."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(("weft.engine", "weft.scheduler", "weft.memory"))
    ]


def _settings(rng: random.Random, number: int) -> SchedulerSettings:
    page_size = (1, 4, 2, 8)[number % 4]
    policies = (
        "fcfs",
        "lpm",
        "fair",
        "priority",
        "dfs-weight",
        "shortest-prefill-first",
        "fair",
        "lpm",
    )
    chunk = (32, 48, -1)[number % 3]
    windows = None
    if number in WINDOWED:
        none = WindowSettings(window=20, num_pages=0)
        least = none.least_pages(page_size, max(chunk, 0))
        windows = WindowSettings(window=20, num_pages=least + 60 // page_size)
    states = None
    if number in STATEFUL:
        # Slots for few more than all rows: copies, snapshots and rows take them from one another.
        states = StateSettings(num_slots=8, least_border=8, least_shared=8)
    return SchedulerSettings(
        num_pages=120 // page_size + 2,
        page_size=page_size,
        max_running_requests=6,
        context_length=110,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=number != 5,
        schedule_policy=policies[number % len(policies)],
        aging_s=rng.choice([0.0, 0.2]),
        preemption_threshold=1,
        max_step_ms=(0.0, 20.0)[number % 2],
        max_prefill_tokens=64,
        chunked_prefill_size=chunk,
        num_layers=8,
        split_prefill_layers=2 if number in LAYERED else 0,
        windows=windows,
        states=states,
        mixed_chunk=number % 4 >= 2,
        max_queued_requests=14,
        max_queue_s=(0.0, 0.5)[number % 2],
        max_run_s=(0.0, 1.5)[number // 4 % 2],
        schedule_conservativeness=0.0,
    )


class FaultyWorld(EngineWorld):
    """`number`: which of the loads. Every second overlaps."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rng = random.Random(f"faults {number}")
        self.classes = random.Random(f"classes {number}")
        fail_steps = {17} if number % 3 == 1 else set()
        settings = _settings(self.rng, number)
        if number in WITH_DRAFTS:
            settings = replace(settings, speculative="prediction,tree,ngram")
        if number in WITH_PICTURES:
            rules = MediaRules(has_three_positions=number > 0, sees_both_ways=not number)
            settings = replace(settings, media=rules, encoder_cache_tokens=60)
        super().__init__(settings, depth=number % 2, fail_steps=fail_steps)
        self.guesses = random.Random(f"guesses {number}")
        planner = self.engine.scheduler.planner
        if isinstance(planner, SplitPlanner):
            planner.least_tokens = 1  # the prompts are short
        self.expected_failures = (Injected, DeviceFailed)
        self.failed_steps: set[int] = set()  # requests of steps that were to fail
        self.tick_s = 0.001
        self.let_steps_cost(StepSeconds(0.001, 0.0004, 1e-6))
        self.recent: deque[set[int]] = deque(
            maxlen=self.engine.depth + 1
        )  # requests of the steps launched last
        self.taken_in: set[int] = set()  # requests of the message that is being taken in
        self.may_end: set[int] | None = None  # as of the fault
        launch = self.runner.launch

        def noted(plan: Plan) -> OracleStep:
            ids = set(self.engine.scheduler.kv.columns.ids[plan.rows].tolist())
            self.recent.append(ids)
            if plan.step in fail_steps:
                self.failed_steps |= ids
            return launch(plan)

        self.runner.launch = noted  # type: ignore[method-assign]

    def raise_at(self, fault: Fault, count: int) -> None:
        """Call number `count` of the target is made."""
        if count == fault.at:
            self.may_end = set().union(*self.recent) | self.taken_in
            raise Injected(f"{fault.target} at call {fault.at}")

    def tell(self, message: ToEngine) -> FromEngine | None:
        ids = [message.id] if hasattr(message, "id") else getattr(message, "ids", ())
        self.taken_in = set(ids)
        reply = super().tell(message)
        self.taken_in = set()
        return reply

    def drive(self) -> None:
        """Send all, and run to the end."""
        rng = self.rng
        families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(2)]
        self.tell(OpenSession(call=1, session_id="s"))
        while len(self.sent) < 26:
            for _ in range(rng.choice([0, 0, 1, 2, 4])):
                self.one(rng, families)
            if rng.random() < 0.12 and self.sent:
                self.abort(Abort(ids=(rng.randrange(len(self.sent)),)))
            if self.num_steps % 5 == 0:
                self.abort_open()
            if rng.random() < 0.25:
                self.tell(rng.choice(CONTROL))
            self.step_on()
        for _ in range(2):  # where the fault is in the first one, its sender asks again
            self.tell(UnblockInput(call=2))
            self.tell(ContinueGeneration(call=2))
        while self.has_work:
            self.step_on()
            assert self.num_steps < 2_000, "no end in sight"

    def abort_open(self) -> None:
        """End a request between two pieces of its prefill, if there is one."""
        planner = self.engine.scheduler.planner
        if isinstance(planner, SplitPlanner) and planner.open:
            self.abort(Abort(ids=(planner.open[0].request.id,)))

    def one(self, rng: random.Random, families: list[list[int]]) -> None:
        """Send a request."""
        if rng.random() < 0.12:
            id = self.send([7, 8, 9], session=SessionParams(id="s"), max_new_tokens=4)
            if id in self.scheduler.requests:
                self.prompts[id] = np.frombuffer(self.request(id).packed, dtype=np.int32).tolist()
            return
        prompt = random_prompt(rng, families, 70)
        media: tuple[MediaItem, ...] = ()
        if self.settings.media is not None and self.guesses.random() < 0.5:
            prompt, media = with_pictures(self.guesses, prompt)
        self.send(
            prompt,
            media=media,
            prediction=prediction(self.guesses, prompt),
            max_new_tokens=rng.choice([1, 4, 20, 30]),
            ignore_eos=rng.random() < 0.5,
            salt=rng.choice(["", "", "other"]),
            user=rng.choice("ab"),
            priority=rng.choice([0, 0, 5]),
            background=self.number in WITH_BACKGROUND and self.classes.random() < 0.5,
            timeout_ms=rng.choice([0, 0, 0, 400]),
        )

    def step_on(self) -> None:
        """A step; where the fault was, with all that must hold behind it."""
        had_fault = self.may_end is not None
        self.step(check=False)
        if self.may_end is not None and (not had_fault or self.num_steps % 8 == 0):
            self.check()


@cache
def counted(number: int) -> Counter[Target]:
    """How often each target is called in a world without a fault."""
    calls = Counter[Target]()

    def counting(target: Target) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **kwargs: Any) -> Any:
                calls[target] += 1
                return function(*args, **kwargs)

            return count

        return wrap

    world = FaultyWorld(number)
    with ExitStack() as stack:
        for target in targets():
            stack.enter_context(replaced(target, counting(target)))
        world.drive()
    world.check_idle()
    return calls


def run_with(fault: Fault, number: int) -> FaultyWorld:
    """Run a world with a fault in it, and look that it did no more harm than it may."""
    world = FaultyWorld(number)
    count = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            mine = count
            if not fault.is_late:
                world.raise_at(fault, mine)
            result = function(*args, **kwargs)
            if fault.is_late:
                world.raise_at(fault, mine)
            return result

        return call

    with replaced(fault.target, wrap):
        world.drive()
    assert world.may_end is not None, "the same load takes the same way"
    check_harm(world, world.may_end)
    return world


def check_harm(world: FaultyWorld, may_end: set[int]) -> None:
    """Only requests of the step, or of the message, in which the fault was have ended with it.
    Everybody else has what a run on its own gives, nothing is left in the books, and it was
    reported."""
    world.check()
    world.check_idle()
    blamed = {id for id, finish in world.finished.items() if finish.status == 500}
    assert blamed <= may_end | world.failed_steps
    counters = world.engine.scheduler.counters
    assert counters.num_faults + counters.messages.num_failed + len(world.failures) > 0
    world.check_outputs()
