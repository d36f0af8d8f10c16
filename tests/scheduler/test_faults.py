"""Whatever function of the scheduler's core or of memory raises: no more ends than the step it was
in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from tests.engine.engine_world import EngineWorld
from tests.faults import Injected
from tests.scheduler.faulty_world import (
    NUM_WORLDS,
    Fault,
    FaultyWorld,
    Target,
    counted,
    drawn_lateness,
    replaced,
    run_with,
    targets,
)
from tests.scheduler.scenes import settings
from tests.seeds import one_in
from weft.engine.guard import MAX_FAILURES_IN_A_ROW, EngineBroken
from weft.memory.allocator import OutOfPages
from weft.messages.requests import Abort
from weft.scheduler.kv import KvMemory
from weft.scheduler.planner import Planner
from weft.scheduler.prefill import PrefillScheduler

NUM_GROUPS = 16
# What no load calls: of policies and caches that have nothing to do with pages, or for people who
# look on. `Scheduler.apply`, `shrink` and `doubt` are called by the engine's control and audit
# alone, and so are `find_faults`, `KvMemory.quarantine` and `last_owner`, and `Fault.users`; those
# of windows and of states, too, and what computing anew resets. No world has a queue so long that
# an order looks at a part of it, a second model that guesses tokens, keeps KV in files, lends pages
# to another server or takes them from one, pins prompts, forgets a prefix that somebody names,
# bounds the time of drafts, composes policies, has a policy of one's own or one in the shadow, or
# puts other sources of drafts in the place of its own, as a simulation does; in none does a request
# end while a step runs whose output is not finite. What a memory asks of its groups once, at its
# start, what holders of memory do by default, and what ends their threads, is not called either.
NEVER_CALLED = 233


def sample(group: int) -> Iterator[tuple[Fault, int]]:
    """One place of every second function of the group, in a world that calls it; long_run.py takes
    many of all."""
    rng = random.Random(f"places {group}")
    first = group + NUM_GROUPS * (group % 2)
    for target in targets()[first :: 2 * NUM_GROUPS]:
        worlds = [number for number in range(NUM_WORLDS) if counted(number)[target]]
        if worlds:
            number = rng.choice(worlds)
            at = rng.randint(1, counted(number)[target])
            is_late = drawn_lateness(rng, target)
            yield Fault(target, at, is_late), number


@pytest.mark.parametrize("group", one_in(4, range(NUM_GROUPS)))
def test_a_fault_anywhere_in_the_core_ends_no_more_than_its_step(group: int) -> None:
    for fault, number in sample(group):
        try:
            run_with(fault, number)
        except Exception as exc:
            exc.add_note(f"{fault} in world {number}")
            raise


def test_the_worlds_with_faults_reach_what_they_are_meant_to() -> None:
    found = targets()
    called = {target for number in range(NUM_WORLDS) for target in counted(number)}
    assert len(found) - len(called) <= NEVER_CALLED
    worlds = [FaultyWorld(number) for number in range(NUM_WORLDS)]
    for world in worlds:
        world.drive()
    stats = [world.scheduler.stats() for world in worlds]
    assert sum(one.total_retractions for one in stats) > 3
    assert sum(one.total_cached_tokens for one in stats) > 100
    assert sum(one.total_aborted for one in stats) > 3
    assert sum(one.total_evicted_states for one in stats) > 10
    resumed = [world.runner.states.num_resumed for world in worlds if world.runner.states]
    assert sum(resumed) > 3
    assert any(world.failed_steps for world in worlds)
    assert not any(one.total_faults for one in stats)


def running(depth: int = 0, **changes: object) -> EngineWorld:
    """An engine in which two requests decode and a long prompt waits."""
    world = EngineWorld(settings(max_running_requests=3, **changes), depth)
    world.expected_failures = (Injected,)
    for start in (40, 60):
        world.send(list(range(start, start + 9)), max_new_tokens=12, ignore_eos=True)
    world.steps(3)
    world.send(list(range(100, 180)), max_new_tokens=4, ignore_eos=True)
    return world


def end_well(world: EngineWorld) -> None:
    world.run_dry()
    world.check_idle()
    world.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_plan_that_fails_once_ends_nobody(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(depth)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "make_batch", _raise)
        world.step()
    end_well(world)
    assert {finish.reason for finish in world.finished.values()} == {"length"}
    assert [str(exc) for exc in world.failures] == ["planted"]
    assert world.scheduler.counters.num_faults == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_for_which_no_memory_can_be_found_is_told_what_is_there(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = running(depth, schedule_policy="fcfs")
    world.expected_failures = (OutOfPages,)
    bad = world.send([250] * 10, max_new_tokens=4, ignore_eos=True)
    extend = KvMemory.extend

    def full(self: KvMemory, request: object) -> object:
        if getattr(request, "id", None) == bad:
            self.alloc(10_000, bad)
        return extend(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(KvMemory, "extend", full)
    end_well(world)
    assert world.finished[bad].status == 500
    assert re.search(
        r"prefill out of memory: [\d,]+ tokens to allocate, \d+ are free and \d+ can be evicted; "
        r"fewer running requests need less \(--max-running-requests\)$",
        world.finished[bad].message,
    )
    after = world.send([9, 9, 9], max_new_tokens=3)
    end_well(world)
    assert world.finished[after].status == 200


@pytest.mark.parametrize("depth", [0, 1])
def test_a_plan_that_fails_for_one_request_again_and_again_ends_that_request_alone(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = running(depth, schedule_policy="fcfs")
    bad = world.send([250] * 10, max_new_tokens=4, ignore_eos=True)
    extend = KvMemory.extend

    def picky(self: KvMemory, request: object) -> object:
        if getattr(request, "id", None) == bad:
            raise Injected("planted")
        return extend(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(KvMemory, "extend", picky)
    world.run_dry()
    world.check_idle()
    assert world.finished[bad].status == 500
    assert "failed twice" in world.finished[bad].message
    told = {id: finish.status for id, finish in world.finished.items()}
    assert set(told.values()) <= {200, 500}
    after = world.send([9, 9, 9], max_new_tokens=3)
    end_well(world)
    assert world.finished[after].status == 200


def test_faults_in_planning_do_not_end_the_engine_however_many_requests_bring_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineWorld(settings())
    world.expected_failures = (Injected,)
    monkeypatch.setattr(KvMemory, "extend", _raise)
    for _ in range(2 * MAX_FAILURES_IN_A_ROW):
        world.send([1, 2, 3], max_new_tokens=3)
        world.run_dry()
    assert {finish.status for finish in world.finished.values()} == {500}
    monkeypatch.undo()
    world.send([1, 2, 3], max_new_tokens=3)
    end_well(world)


def test_a_device_that_takes_no_step_any_more_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    monkeypatch.setattr(world.runner, "launch", _raise)
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        world.send([1, 2, 3], max_new_tokens=3)
        world.step()
    world.send([1, 2, 3], max_new_tokens=3)
    with pytest.raises(EngineBroken):
        world.step()


def test_failures_with_a_good_step_between_them_do_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    for _ in range(2 * MAX_FAILURES_IN_A_ROW):
        with monkeypatch.context() as patch:
            patch.setattr(world.runner, "launch", _raise)
            for _ in range(MAX_FAILURES_IN_A_ROW - 1):
                world.send([1, 2, 3], max_new_tokens=3)
                world.step()
        world.step()
    end_well(world)


def test_a_step_that_the_device_does_not_take_ends_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    with monkeypatch.context() as patch:
        patch.setattr(world.runner, "launch", _raise)
        world.step()
    end_well(world)
    assert {id: finish.status for id, finish in world.finished.items()} == {0: 200, 1: 200, 2: 500}


def test_the_new_owner_of_a_row_does_not_pay_for_the_step_of_the_former() -> None:
    """With overlap: the step that fails was launched for a request that has ended since, and whose
    row is taken."""
    world = EngineWorld(settings(max_running_requests=1), depth=1, fail_steps={2})
    first = world.send([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    second = world.send([4, 5, 6], max_new_tokens=3, ignore_eos=True)
    while world.scheduler.planner.num_steps < 3:
        world.step()
    world.abort(Abort(ids=(first,)))
    end_well(world)
    assert world.failures
    assert world.finished[first].reason == "abort"
    assert world.finished[second].reason == "length"


@pytest.mark.parametrize("name", ["release", "share"])
def test_tokens_of_a_result_are_told_though_an_end_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = running()
    before = getattr(KvMemory, name)
    calls = 0

    def once(self: KvMemory, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        before(self, *args, **kwargs)
        if calls == 1:
            raise Injected("planted")
        return None

    monkeypatch.setattr(KvMemory, name, once)
    end_well(world)
    assert calls > 1
    assert {finish.status for finish in world.finished.values()} == {200}
    counters = world.scheduler.counters
    assert counters.num_faults + counters.messages.num_failed == 1


def test_the_books_are_rebuilt_also_where_rebuilding_them_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    target = Target("weft.scheduler.request.Columns", "reset")
    calls = []

    def fails_once(function: object) -> object:
        def call(self: object) -> None:
            calls.append(self)
            if len(calls) == 1:
                raise Injected("planted, too")
            function(self)  # type: ignore[operator]

        return call

    with replaced(target, fails_once), monkeypatch.context() as patch:  # type: ignore[arg-type]
        patch.setattr(PrefillScheduler, "next_batch", _raise)
        world.step()
    assert len(calls) == 2
    end_well(world)
    assert {finish.status for finish in world.finished.values()} == {200}


def _raise(*args: object, **kwargs: object) -> None:
    raise Injected("planted")
