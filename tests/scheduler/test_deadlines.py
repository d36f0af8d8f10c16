"""Requests that take too long are ended wherever they are. The clock of a world goes on by 1 s a
step."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.scenes import Patience, settings
from tests.scheduler.world import World
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.limits import MAX_STALE, Deadlines
from weft.scheduler.request import Request, RequestState


def steps(world: World, count: int) -> None:
    for _ in range(count):
        world.step()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", ["mid-chunk", "running", "retracted"])
def test_a_request_that_runs_too_long_ends_with_408_in_every_state(state: str, depth: int) -> None:
    world = World(settings(chunked_prefill_size=8, num_pages=100, context_length=100), depth)
    id = world.send(list(range(20)), max_new_tokens=60, ignore_eos=True, timeout_ms=9_000)
    other = world.send(list(range(50, 55)), max_new_tokens=20, ignore_eos=True)
    if state == "mid-chunk":
        world.step()
        assert world.scheduler.prefills.chunked_req is world.request(id)
        world.time = 8.5
    elif state == "retracted":
        steps(world, 6)
        while depth and world.loop._in_flight:
            world.receive(world.loop._commit(world.loop._in_flight.popleft()))  # type: ignore[arg-type]
        world.scheduler.retract(world.request(id))
        assert world.request(id).state is RequestState.WAITING
        world.time = 8.5
    else:
        steps(world, 8)
        assert id not in world.finished
    world.step()
    finish = world.finished[id]
    assert finish.reason == "abort"
    assert finish.status == 408
    assert "9 s" in finish.message
    world.run_dry()
    assert world.finished[other].reason == "length"
    world.step()
    world.check_idle()
    world.check_outputs()


def test_a_request_that_has_not_begun_in_time_ends_with_503() -> None:
    world = World(settings(max_running_requests=1))
    runs = world.send([1], max_new_tokens=30, ignore_eos=True)
    waits = world.send([2], max_new_tokens=3, timeout_ms=4_500)
    steps(world, 4)
    assert waits not in world.finished
    world.step()
    assert world.finished[waits].reason == "abort"
    assert world.finished[waits].status == 503
    assert "begun" in world.finished[waits].message
    world.run_dry()
    assert world.finished[runs].completion_tokens == 30
    world.check_idle()


def test_the_global_limits_hold_for_waiting_and_for_running() -> None:
    world = World(settings(max_running_requests=1, max_queue_s=8.0, max_run_s=5.0))
    ids = [world.send([i], max_new_tokens=50, ignore_eos=True) for i in range(3)]
    world.run_dry()
    ends = [world.finished[id] for id in ids]
    assert [(end.reason, end.status) for end in ends] == [
        ("abort", 408),
        ("abort", 408),
        ("abort", 503),
    ]
    assert [end.completion_tokens for end in ends] == [5, 5, 0]
    assert "--max-run-s" in ends[0].message
    assert "--max-queue-s" in ends[2].message
    world.check_idle()


def test_a_request_that_was_taken_back_is_not_ended_for_waiting() -> None:
    world = World(settings(max_queue_s=3.0))
    id = world.send([1, 2], max_new_tokens=5, ignore_eos=True)
    steps(world, 2)
    world.scheduler.retract(world.request(id))
    world.time = 50.0
    world.run_dry()
    assert world.finished[id].reason == "length"
    world.check_outputs()


def test_an_engine_in_which_nothing_runs_ends_what_waits() -> None:
    patience = Patience()
    world = World(settings(), features=(patience,))
    world.send([0], max_new_tokens=1)
    held = world.send([1], max_new_tokens=3, timeout_ms=6_000)
    steps(world, 5)
    assert world.has_work
    assert held not in world.finished
    world.step()
    assert world.finished[held].status == 503
    assert not world.has_work


def test_a_deadline_of_an_ended_request_does_not_touch_its_successor() -> None:
    world = World(settings())
    world.send([1], max_new_tokens=30, ignore_eos=True, timeout_ms=3_000)
    world.abort(Abort(ids=(0,)))
    world.step()
    world.sent.clear()
    world.finished.clear()
    assert world.send([1], max_new_tokens=10, ignore_eos=True) == 0
    world.run_dry()
    assert world.finished[0].reason == "length"


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    world = World(settings())
    for _ in range(3 * MAX_STALE):
        world.abort(Abort(ids=(world.send([1], timeout_ms=10**9),)))
        world.step(check=False)
    assert len(world.scheduler.limits.deadlines._heap) <= MAX_STALE + 1


def waiting_request(number: int, now: float, timeout_ms: int) -> Request:
    message = GenerateRequest(
        id=number,
        rid=f"r{number}",
        input_ids=bytes(4),
        sampling=SamplingParams(),
        timeout_ms=timeout_ms,
    )
    return Request(message, max_len=9, seed=0, arrival_order=number, arrival_s=now)


@pytest.mark.parametrize("seed", range(6))
def test_each_request_is_admitted_or_removed_and_only_expired_ones_end(
    seed: int,
) -> None:
    rng = random.Random(f"deadlines {seed}")
    max_queue_s = rng.choice([0.0, 7.0])
    max_run_s = rng.choice([0.0, 9.0])
    deadlines = Deadlines(max_queue_s=max_queue_s, max_run_s=max_run_s)
    requests: dict[int, Request] = {}
    num_expired = 0
    for number in range(400):
        now = 0.5 * number
        request = waiting_request(number, now, rng.choice([0, 3_000, 12_000]))
        requests[number] = request
        deadlines.arrived(request)
        if rng.random() < 0.2:
            deadlines.forget(requests.pop(number))
        for one in rng.sample(list(requests.values()), min(len(requests), 2)):
            if one.admitted_s < 0:
                one.admitted_s = now
                deadlines.admitted(one)
        over = {id for id, one in requests.items() if deadlines.end_s(one) <= now}
        expired = set()
        for late in deadlines.expired(requests, now):
            expired.add(late.request.id)
            del requests[late.request.id]
        assert expired == over
        num_expired += len(expired)
    assert num_expired > (100 if max_queue_s and max_run_s else 30)
