"""The flow of work: blocking, pausing, health checks, aborts in every state, and sleeping while
nothing can go on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.engine.engine_world import EngineWorld, request
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.engine.explain import NOT_LOOKED_AT, Reasons
from weft.messages.calls import CallFailed
from weft.messages.control import (
    BlockInput,
    ContinueGeneration,
    ExplainRequest,
    ExplainRequestReply,
    FlushCache,
    FlushCacheReply,
    HealthCheck,
    HealthCheckReply,
    InputReply,
    ListRequests,
    PauseGeneration,
    UnblockInput,
)
from weft.messages.requests import Abort
from weft.plan.device import DeviceReply, DeviceRequest, MeetOthers
from weft.scheduler.feature import Admission, Feature
from weft.scheduler.pace.ramp import Ramp
from weft.scheduler.request import Request, RequestState

# Blocking


@pytest.mark.parametrize("depth", [0, 1])
def test_while_the_input_is_blocked_nothing_is_lost_and_what_came_before_goes_on(
    depth: int,
) -> None:
    world = EngineWorld(settings(max_running_requests=2), depth)
    before = [world.send([i, 5], max_new_tokens=6, ignore_eos=True) for i in range(3)]
    world.steps(2)
    assert world.tell(BlockInput(call=1)) == InputReply(call=1, state="blocked", held_requests=0)
    held = [world.send([i, 6], max_new_tokens=3, ignore_eos=True) for i in range(3)]
    assert world.tell(BlockInput(call=2)) == InputReply(call=2, state="blocked", held_requests=3)
    world.steps(20)
    assert sorted(world.finished) == before
    assert world.why() == ["the input is blocked until POST /unblock"] * 3
    flushed = world.tell(FlushCache(call=3))  # control requests work
    world.step()
    assert flushed is None
    assert world.answers(FlushCacheReply) == [FlushCacheReply(call=3, success=True)]
    assert world.tell(UnblockInput(call=4)) == InputReply(
        call=4, state="unblocked", held_requests=0
    )
    assert world.tell(UnblockInput(call=5)) == InputReply(
        call=5, state="unblocked", held_requests=0
    )
    assert world.why() == [NOT_LOOKED_AT] * 3
    world.run_dry()
    assert list(world.finished)[-3:] == held
    world.check_idle()
    world.check_outputs()


def test_a_held_request_is_explained_obeys_its_deadline_and_can_be_aborted() -> None:
    world = EngineWorld(settings())
    world.tell(BlockInput(call=1))
    late = world.send([1], max_new_tokens=2, timeout_ms=3_000)
    aborted, kept = (world.send([i], max_new_tokens=2, ignore_eos=True) for i in (2, 3))
    world.abort(Abort(ids=(aborted,)))
    world.steps(5)
    assert world.finished[aborted].reason == "abort"
    assert (world.finished[late].status, set(world.finished)) == (503, {aborted, late})
    world.tell(UnblockInput(call=2))
    world.run_dry()
    told = world.tell(ExplainRequest(f"r{kept}"))
    assert isinstance(told, ExplainRequestReply)
    trace = [entry.what for entry in told.found[0].timeline]
    assert trace[1:3] == [
        "held: the input is blocked until POST /unblock",
        "released: the input is open again",
    ]
    assert "admitted" in trace[3]
    assert not [line for line in trace if line.startswith("waits")]
    world.check_idle()


@pytest.mark.parametrize(
    "policy", ["fcfs", "lpm", "lof", "priority", "fair", "hrrn", "static", "dfs-weight"]
)
def test_every_policy_leaves_held_requests_alone_and_takes_them_up_again(policy: str) -> None:
    world = EngineWorld(settings(schedule_policy=policy, aging_s=2.0, max_running_requests=2))
    for i in range(6):
        if i == 3:
            world.tell(BlockInput(call=1))
        world.send([i, 4, 4, i], max_new_tokens=4, priority=i, user=str(i % 2))
    world.steps(40)
    assert sorted(world.finished) == [0, 1, 2]
    world.tell(UnblockInput(call=2))
    world.run_dry()
    world.check_idle()
    world.check_outputs()


# Pausing


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_stops_generation_and_going_on_finishes_what_is_left(mode: str, depth: int) -> None:
    world = EngineWorld(settings(max_running_requests=3, chunked_prefill_size=8), depth)
    ids = [world.send(list(range(i, i + 20)), max_new_tokens=8, ignore_eos=True) for i in range(4)]
    world.steps(6)
    world.tell(PauseGeneration(call=1, mode=mode))  # type: ignore[arg-type]
    world.tell(PauseGeneration(call=2, mode=mode))  # type: ignore[arg-type]
    later = world.send([9, 9], max_new_tokens=2, ignore_eos=True)
    world.step()
    num_run = world.runner.num_tokens_run
    world.steps(5)
    assert world.runner.num_tokens_run == num_run
    assert world.engine.wait_s > 0
    assert set(world.finished) == (set(ids) if mode == "abort" else set())
    assert all(why == "generation is paused until POST /continue_generation" for why in world.why())
    rows = {one.row for one in world.scheduler.requests.values()} - {-1}
    assert bool(rows) == (mode == "in_place")
    world.tell(FlushCache(call=3))
    world.step()
    [flushed] = world.answers(FlushCacheReply)
    assert flushed.success == (mode != "in_place")
    world.tell(ContinueGeneration(call=4))
    world.run_dry()
    assert world.finished[later].reason == "length"
    assert {world.finished[id].reason for id in ids} == {"abort" if mode == "abort" else "length"}
    world.check_idle()
    world.check_outputs()


def test_deadlines_and_aborts_hold_while_generation_is_paused() -> None:
    world = EngineWorld(settings())
    late, aborted = (
        world.send([1], max_new_tokens=50, timeout_ms=6_000),
        world.send([2], max_new_tokens=50),
    )
    world.steps(2)
    world.tell(PauseGeneration(call=1, mode="in_place"))
    world.abort(Abort(ids=(aborted,)))
    world.step()
    assert world.finished[aborted].reason == "abort"
    world.step()
    assert 0 < world.engine.wait_s <= 6.0  # nothing to do before the deadline
    world.steps(5)
    assert world.finished[late].status == 408
    world.check_idle()


# Health checks


@pytest.mark.parametrize("depth", [0, 1])
def test_a_health_check_is_answered_by_the_next_result_whatever_waits(depth: int) -> None:
    world = EngineWorld(settings(max_running_requests=2, max_queued_requests=20), depth)
    for i in range(22):
        world.send([i], max_new_tokens=30, ignore_eos=True)
        world.step()
    num_requests = world.scheduler.stats().total_requests
    assert world.tell(HealthCheck(call=5)) is None
    world.step()
    assert world.answers(HealthCheckReply) == [HealthCheckReply(call=5, success=True)]
    assert world.scheduler.stats().total_requests == num_requests
    world.run_dry()
    world.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_idle_engine_generates_a_token_for_a_health_check_and_shows_it_to_nobody(
    depth: int,
) -> None:
    world = EngineWorld(settings(), depth)
    world.tell(HealthCheck(call=5))
    world.tell(HealthCheck(call=6))
    assert world.has_work
    world.run_dry()
    assert [reply.call for reply in world.answers(HealthCheckReply)] == [5, 6]
    assert world.scheduler.stats().total_generated_tokens == 1
    assert not world.finished
    world.check_idle()


def test_a_health_check_is_answered_while_blocked_while_paused_and_after_an_abort_of_everything() -> (
    None
):
    world = EngineWorld(settings())
    world.tell(BlockInput(call=1))
    world.send([1], max_new_tokens=2, ignore_eos=True)
    world.tell(HealthCheck(call=2))
    world.steps(3)
    assert world.answers(HealthCheckReply) == [HealthCheckReply(call=2, success=True)]
    world.tell(UnblockInput(call=3))
    world.tell(PauseGeneration(call=4, mode="in_place"))
    paused = world.tell(HealthCheck(call=5))
    assert paused == HealthCheckReply(call=5, success=True, message="generation is paused")
    world.tell(ContinueGeneration(call=6))
    world.run_dry()
    world.tell(HealthCheck(call=7))
    world.abort(Abort(all=True))
    world.steps(3)
    assert world.answers(HealthCheckReply)[-1].call == 7
    world.check_idle()


def test_a_health_check_of_a_device_that_fails_says_so() -> None:
    world = EngineWorld(settings(), fail_steps={0})
    world.tell(HealthCheck(call=1))
    world.run_dry()
    [reply] = world.answers(HealthCheckReply)
    assert (reply.success, reply.message) == (False, "the model failed on this request's step")
    world.check_idle()


# Aborts

STATES: dict[str, Callable[[EngineWorld, int], None]] = {
    "waiting": lambda world, id: None,
    "mid-chunk": lambda world, id: world.step(),
    "running": lambda world, id: world.steps(7),
    "retracted": lambda world, id: _retract(world, id),
    "paused": lambda world, id: _pause(world, 7),
    "paused mid-chunk": lambda world, id: _pause(world, 1),
    "finished": lambda world, id: world.run_dry(),
}


def _retract(world: EngineWorld, id: int) -> None:
    world.steps(7)
    world.engine.core.settle()
    world.scheduler.merge_last_batch()
    world.scheduler.retract(world.request(id))


def _pause(world: EngineWorld, after: int) -> None:
    world.steps(after)
    world.tell(PauseGeneration(call=1, mode="in_place"))


@pytest.mark.pairs
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("how", ["id", "rid", "group", "all"])
@pytest.mark.parametrize("state", [*STATES, "blocked"])
def test_an_abort_ends_a_request_within_one_step_in_every_state(
    state: str, how: str, depth: int
) -> None:
    world = EngineWorld(settings(chunked_prefill_size=8, num_pages=200, context_length=100), depth)
    if state == "blocked":
        world.tell(BlockInput(call=1))
    chosen = request(
        0, list(range(20)), rid="batch-1-0", group="batch-1", max_new_tokens=10, ignore_eos=True
    )
    other = request(
        1, [7] * 9, rid="batch-1-01", group="batch-10", max_new_tokens=12, ignore_eos=True
    )
    world.expect(chosen, other)
    world.take_in(chosen)
    STATES.get(state, lambda world, id: None)(world, 0)
    world.take_in(other)
    names = {
        "id": {"ids": (0,)},
        "rid": {"names": ("batch-1-0",)},
        "group": {"names": ("batch-1",)},
    }
    world.abort(Abort(**names.get(how, {"all": True}), message="enough"))  # type: ignore[arg-type]
    world.step()
    finish = world.finished[0]
    assert (finish.reason, finish.message) == (
        ("length", "") if state == "finished" else ("abort", "enough")
    )
    assert 0 not in world.scheduler.requests
    assert (1 in world.finished) == (how == "all")
    world.tell(ContinueGeneration(call=2))
    world.tell(UnblockInput(call=3))
    world.run_dry()
    world.check_idle()
    world.check_outputs()


def test_names_that_only_begin_alike_and_empty_names_are_not_meant() -> None:
    world = EngineWorld(settings())
    for id, rid in enumerate(("req-1", "req-10", "req-1")):
        world.expect(request(id, [id], rid=rid, max_new_tokens=3))
        world.take_in(world.sent[id])
    world.abort(Abort(names=("", "req-1")))
    world.run_dry()
    assert [world.finished[id].reason == "abort" for id in range(3)] == [True, False, True]


# Sleeping


class Slow(Feature):
    """Holds requests until the time has come."""

    def __init__(self) -> None:
        self.is_over = False

    def admit(self, request: Request) -> Admission:
        return Admission.READY if self.is_over else Admission.WAIT


def test_a_request_that_a_part_holds_does_not_keep_the_engine_busy() -> None:
    world = EngineWorld(settings())
    part = Slow()
    world.scheduler.hooks.add(part)
    assert world.engine.wait_s == math.inf
    world.send([1, 2], max_new_tokens=2)
    assert world.engine.wait_s == 0  # something has come
    slept = 0.0
    num_steps = 0
    while slept < 1.0:
        world.step(check=False)
        slept += world.engine.wait_s
        num_steps += 1
    assert num_steps < 60
    assert world.scheduler.requests[0].state is RequestState.WAITING
    part.is_over = True
    world.run_dry()
    assert world.engine.wait_s == math.inf
    world.check_idle()


def test_questions_become_rare_and_a_message_makes_them_frequent_again() -> None:
    world = EngineWorld(settings())
    world.tick_s = 0.001
    part = Slow()
    world.scheduler.hooks.add(part)
    world.send([1, 2], max_new_tokens=2)
    waits = []
    for _ in range(8):
        world.step(check=False)
        waits.append(round(1e3 * world.engine.wait_s))
    assert waits == [1, 2, 4, 8, 16, 20, 20, 20]
    world.tell(ListRequests(call=1))
    assert world.engine.wait_s == 0
    world.step(check=False)
    assert round(1e3 * world.engine.wait_s) == 1
    part.is_over = True
    world.run_dry()


def test_a_plain_step_visits_the_audit_and_the_load_and_no_other_service() -> None:
    world = EngineWorld(settings())
    world.send([1, 2, 3], max_new_tokens=8)
    world.step()
    hooks = world.engine.core.hooks
    assert {service.name for service in hooks.attached} == {
        "the audit of KV memory",
        "the report of the load",
    }
    assert not hooks.working
    assert hooks.before_step == hooks.refuses == hooks.opened == hooks.filter_output == ()
    world.run_dry()


# Beginning anew


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_that_starts_over_has_forgotten_what_it_did(depth: int) -> None:
    world = RecordedWorld(settings(), depth)
    world.send([1, 2, 3], max_new_tokens=4)
    world.run_dry()
    world.engine.start_over()
    assert world.engine.scheduler.stats().kv_evictable == 0
    assert world.engine.scheduler.stats().total_requests == 0
    assert world.engine.scheduler.planner.num_steps == 0
    assert world.engine.scheduler.history.trace(0) is None


def test_with_a_ramp_requests_go_on_in_order_at_a_growing_rate_and_say_why_they_wait() -> None:
    world = EngineWorld(settings(max_running_requests=32))
    world.tick_s = 1.0
    world.tell(BlockInput(call=1))
    ids = [world.send([9] * 5, max_new_tokens=1) for _ in range(16)]
    reply = world.tell(UnblockInput(call=2, ramp_s=8.0))
    assert reply == InputReply(call=2, state="ramping", held_requests=16, ramp_left_s=8.0)
    ended = []
    while world.engine.services.flow.input_gate.state != "unblocked":
        held = [
            world.scheduler.waiting_queue.is_blocked(one) for one in world.scheduler.waiting_queue
        ]
        assert held == sorted(held)  # the first go on first
        waiting = list(world.scheduler.waiting_queue.blocked())
        if waiting:
            why = Reasons(world.scheduler).of(waiting[0])
            assert why.startswith("the input opens gradually: ")
        world.step()
        ended.append(16 - len(list(world.scheduler.waiting_queue.blocked())))
    assert ended == [0, 1, 2, 4, 6, 9, 12, 16]
    world.run_dry()
    assert {world.finished[id].reason for id in ids} == {"length"}


def test_an_engine_with_nothing_to_do_wakes_for_each_turn_of_a_ramp() -> None:
    ramp = Ramp(100.0, 8.0, 50, num_blocked=16)
    assert [ramp.frontier(100.0 + t, 66) for t in range(9)] == [50, 50, 51, 52, 54, 56, 59, 62, 66]
    for blocked_from in range(50, 66):
        at = ramp.next_s(blocked_from, 66)
        assert ramp.frontier(at, 66) == blocked_from + 1
        assert ramp.frontier(at - 0.01, 66) == blocked_from
    assert ramp.next_s(66, 66) == 108.0
    assert [ramp.left_s(at) for at in (100.0, 103.0, 109.0)] == [8.0, 5.0, 0.0]


def test_in_a_ramp_requests_that_come_meanwhile_soon_go_on_as_fast_as_they_come() -> None:
    # Four come in each second, behind 16 that had waited.
    ramp = Ramp(100.0, 8.0, 50, num_blocked=16)
    passed = [ramp.frontier(100.0 + t, 66 + 4 * t) - 50 for t in range(9)]
    assert passed == [0, 1, 4, 9, 16, 23, 31, 39, 48]
    assert passed[-1] == 16 + 4 * 8
    for num_requests in (58, 66, 74, 82, 98):
        for blocked_from in range(50, num_requests):
            at = ramp.next_s(blocked_from, num_requests)
            assert ramp.frontier(at, num_requests) == blocked_from + 1


def test_a_change_at_one_moment_waits_at_the_barrier_and_keeps_the_order() -> None:
    world = EngineWorld(settings(max_running_requests=32))
    world.tick_s = 1.0
    first = world.send([9] * 5, max_new_tokens=2)
    reply = world.tell(BlockInput(call=1, at_s=world.time + 2.5))
    assert reply == InputReply(call=1, state="barrier", held_requests=0)
    second = world.send([9] * 5, max_new_tokens=2)  # still before the moment
    while world.engine.services.flow.input_gate.state == "barrier":
        world.step()
    held = [world.send([9] * 5, max_new_tokens=2) for _ in range(3)]
    world.step()
    assert [one.id for one in world.scheduler.waiting_queue.blocked()] == held
    assert world.tell(UnblockInput(call=2, at_s=world.time + 2.5)).state == "barrier"
    waiting = next(world.scheduler.waiting_queue.blocked())
    assert "at one moment" in Reasons(world.scheduler).of(waiting)
    while world.engine.services.flow.input_gate.state == "barrier":
        assert not any(id in world.finished for id in held)
        world.step()
    world.run_dry()
    assert list(world.finished) == [first, second, *held]


def test_a_pause_can_end_with_a_ramp() -> None:
    world = EngineWorld(settings(max_running_requests=32))
    world.tell(PauseGeneration(call=1, mode="retract"))
    ids = [world.send([9] * 5, max_new_tokens=1) for _ in range(4)]
    world.tell(ContinueGeneration(call=2, ramp_s=4.0))
    assert world.engine.services.flow.input_gate.state == "ramping"
    world.run_dry()
    assert {world.finished[id].reason for id in ids} == {"length"}


class Meeting:
    """A device on which the other engines are waited for."""

    def __init__(self) -> None:
        self.reply: DeviceReply | None = None

    def done(self) -> bool:
        return self.reply is not None

    def result(self) -> DeviceReply:
        assert self.reply is not None
        return self.reply


def test_engines_that_keep_step_change_their_inputs_when_all_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = EngineWorld(settings(max_running_requests=32))
    meetings: list[Meeting] = []

    def control(request: DeviceRequest) -> Meeting:
        assert isinstance(request, MeetOthers)
        meetings.append(Meeting())
        return meetings[-1]

    monkeypatch.setattr(world.runner, "control", control)
    gate = world.engine.services.flow.input_gate
    running = world.send([9] * 5, max_new_tokens=4, ignore_eos=True)
    assert world.tell(BlockInput(call=1, together=True)) is None
    world.steps(2)
    assert gate.state == "barrier"
    early = world.send([9] * 5, max_new_tokens=4, ignore_eos=True)
    world.steps(1)
    assert (
        world.why()
        == [
            "waits: all engines come to the same step, to open or block their inputs there; "
            "no step runs meanwhile"
        ]
        * 2
    )
    meetings[0].reply = DeviceReply(ok=True)
    world.steps(1)
    (reply,) = world.answers(InputReply)
    assert (reply.call, reply.state) == (1, "blocked")
    held = [world.send([9] * 5, max_new_tokens=2) for _ in range(3)]
    world.steps(10)
    assert sorted(world.finished) == [running, early]
    assert world.tell(UnblockInput(call=2, together=True)) is None
    world.steps(2)
    assert gate.state == "barrier"
    assert world.why() == ["the input is blocked until all engines open it, at one moment"] * 3
    meetings[1].reply = DeviceReply(ok=False, message="another engine did not come", status=503)
    world.steps(1)
    assert gate.state == "blocked"
    assert world.answers(CallFailed)[-1].message == "another engine did not come"
    assert world.why() == ["the input is blocked until POST /unblock"] * 3
    assert world.tell(UnblockInput(call=3, together=True)) is None
    world.steps(1)
    meetings[2].reply = DeviceReply(ok=True)
    world.run_dry()
    assert gate.state == "unblocked"
    assert sorted(world.finished) == [running, early, *held]
