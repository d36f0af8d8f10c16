"""Deadlines of first tokens: who goes first, who is refused, and how good the estimates are that
decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.policy_twins import order
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.timed import STEP_S, TOKEN_S, timed, timed_engine
from tests.scheduler.world import World
from weft.cli.main import main
from weft.config.options import SettingsError
from weft.config.pairs import parse_tenant_ttft, why_no_ttft
from weft.engine.deadline_service import REST_S
from weft.messages.control import (
    BlockInput,
    ContinueGeneration,
    ExplainRequest,
    PauseGeneration,
    UnblockInput,
)
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort
from weft.scheduler.estimate import wait
from weft.scheduler.estimate.band import COVERED, Calibration
from weft.scheduler.limits import MIN_RETRY_S
from weft.scheduler.request import Request

# The order


def test_the_earliest_deadline_goes_first_and_none_goes_last() -> None:
    world = World(settings(schedule_policy="deadline", max_running_requests=1))
    world.send([1], max_new_tokens=9, ignore_eos=True)
    world.step()
    none = world.send([2], max_new_tokens=1)
    late = world.send([3], max_new_tokens=1, ttft_ms=90_000)
    early = world.send([4], max_new_tokens=1, ttft_ms=30_000)
    by_end = world.send([5], max_new_tokens=1, timeout_ms=60_000)
    assert order(world) == [early, by_end, late, none]


@pytest.mark.parametrize("max_slowdown", [2.5, -1.0])
def test_requests_that_are_too_late_go_after_those_in_time(max_slowdown: float) -> None:
    bounds = {"max_running_requests": 1, "max_slowdown": max_slowdown}
    world = timed(World(settings(schedule_policy="deadline", **bounds)))
    world.send([1], max_new_tokens=40, ignore_eos=True)
    world.step()
    lost = world.send([2] * 100, max_new_tokens=1, ttft_ms=40)  # its prompt alone takes 100 ms
    short = world.send([3] * 10, max_new_tokens=1, ttft_ms=5_000)
    assert order(world) == [short, lost]


def test_deadlines_count_within_a_class_and_within_a_tenant() -> None:
    world = World(settings(schedule_policy="priority > fair(key) > deadline > lof"))
    late = world.send([3], max_new_tokens=1, ttft_ms=90_000)
    early = world.send([4], max_new_tokens=1, ttft_ms=30_000)
    high = world.send([5], max_new_tokens=1, priority=1)
    assert order(world) == [high, early, late]


# Refusal


@pytest.mark.parametrize("max_slowdown", [2.5, -1.0])
def test_a_request_that_cannot_have_its_first_token_in_time_is_refused_when_it_comes(
    max_slowdown: float,
) -> None:
    world = timed_engine(max_running_requests=1, max_slowdown=max_slowdown)
    for number in range(10):
        world.send([number] * 30, max_new_tokens=20, ignore_eos=True)
    world.step(check=False)
    hurried = world.send([7] * 5, max_new_tokens=2, ttft_ms=200)
    patient = world.send([8] * 5, max_new_tokens=2, ttft_ms=60_000)
    world.step(check=False)
    finish = world.finished[hurried]
    assert finish.status == 503
    assert finish.reason == "error"
    assert finish.completion_tokens == 0
    assert "which is later than ttft_ms (200) allows" in finish.message
    assert 1 <= finish.retry_after_s <= 60
    world.run_dry(check=False)
    assert world.finished[patient].status == 200
    world.check_idle()


def warnings_of(world: EngineWorld) -> list[str]:
    """The texts of all warnings that come from now on."""
    told: list[str] = []
    receive = world.receive

    def listen(output: StepOutput) -> None:
        told.extend(warning.text for warning in output.warnings)
        receive(output)

    world.receive = listen  # type: ignore[method-assign]
    return told


def judged(ttft_ms: int, waited_s: float = 0.0) -> tuple[Finish | None, str]:
    """The refusal of a request behind ten others, or what it is told; `waited_s` before it is
    judged."""
    world = timed_engine(max_running_requests=1)
    for number in range(10):
        world.send([number] * 30, max_new_tokens=20, ignore_eos=True)
    world.step(check=False)
    told = warnings_of(world)
    id = world.send([7] * 5, max_new_tokens=2, ttft_ms=ttft_ms)
    world.time += waited_s
    world.step(check=False)
    finish = world.finished.get(id)
    return finish, "".join(told)


def likely_ms(told: str) -> float:
    """Before anything is learnt, the band is a factor of four on both sides."""
    low, high = map(int, told.split("-"))
    assert high == pytest.approx(16 * low, rel=0.02)
    return low * 4


def test_a_request_is_refused_where_it_is_likelier_to_be_late_than_not() -> None:
    refusal, told = judged(600_000)
    assert refusal is None
    expected = likely_ms(told)
    assert judged(int(1.2 * expected))[0] is None
    refusal, _ = judged(int(0.8 * expected))
    assert refusal is not None
    # It is to come again when its time would do.
    assert refusal.retry_after_s == max(math.ceil(0.2 * expected / 1_000), MIN_RETRY_S)


def test_what_a_request_has_waited_before_it_is_judged_counts() -> None:
    expected = likely_ms(judged(600_000)[1])
    _, told = judged(600_000, waited_s=5.0)
    low, high = map(int, told.split("-"))
    assert low == pytest.approx(5_000 + expected / 4, rel=0.02)
    assert high == pytest.approx(5_000 + expected * 4, rel=0.02)
    assert judged(int(5_000 + 1.2 * expected), waited_s=5.0)[0] is None
    assert judged(int(5_000 + 0.8 * expected), waited_s=5.0)[0] is not None


def num_walks(world: EngineWorld) -> Callable[[], int]:
    """How often the order of the queue was asked for outside of steps, from now on."""
    queue = world.scheduler.waiting_queue
    walks: list[float] = []
    inner = queue.order

    def order_of(now: float) -> Iterator[Request]:
        walks.append(now)
        return inner(now)

    def num() -> int:
        queue.order = order_of  # type: ignore[method-assign]
        walks.clear()
        service = world.engine.services.deadlines
        service.before_step(world.time)
        queue.order = inner  # type: ignore[method-assign]
        return len(walks)

    return num


@pytest.mark.parametrize("policy", ["fcfs", "lof", "fair", "priority > fair(key) > deadline"])
@pytest.mark.parametrize("max_played", [256, 12])
def test_one_walk_over_the_queue_tells_all_that_have_come_what_walks_for_each_would(
    policy: str, max_played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "MAX_PLAYED", max_played)
    world = timed_engine(max_running_requests=3, schedule_policy=policy)
    walks = num_walks(world)
    for number in range(30):
        tenant = f"t{number % 4}"
        world.send([number] * 30, max_new_tokens=9 + number % 7, ignore_eos=True, tenant=tenant)
    world.step(check=False)
    ids = [
        world.send([n] * (5 + n), max_new_tokens=n + 1, tenant=f"t{n % 5}", ttft_ms=90_000)
        for n in range(12)
    ]
    estimator = world.engine.services.deadlines._estimator
    assert estimator is not None
    now = world.time
    of_each: dict[int, float] = {}
    for id in ids:
        of_each |= estimator.first_tokens_s({id: math.inf}, now, [])
    assert estimator.first_tokens_s(dict.fromkeys(ids, math.inf), now, []) == of_each
    assert sorted(of_each) == ids
    assert walks() == 1
    world.run_dry(check=False)
    assert all(world.finished[id].status == 200 for id in ids)


# Late by what is expected, or only by what waits have taken of late: three times as long.
@pytest.mark.parametrize(("ttft_ms", "factor"), [(20, 1.0), (500, 3.0)])
def test_a_refused_request_takes_nothing_from_those_that_came_with_it(
    ttft_ms: int, factor: float
) -> None:
    found = []
    for num_hopeless in (0, 30):
        world = timed_engine(max_running_requests=1)
        calibration = world.engine.services.deadlines.calibration
        for _ in range(20):
            calibration.learn(1.0, calibration.band(1.0), factor)
        world.send([1] * 30, max_new_tokens=20, ignore_eos=True)
        world.step(check=False)
        told = warnings_of(world)
        hopeless = [
            world.send([n] * 90, max_new_tokens=9, ttft_ms=ttft_ms)
            for n in range(2, 2 + num_hopeless)
        ]
        patient = world.send([50] * 30, max_new_tokens=2, ttft_ms=9_000)
        world.step(check=False)
        assert all(world.finished[id].status == 503 for id in hopeless)
        assert patient not in world.finished
        found.append(told)
    assert found[0] == found[1]


def test_behind_a_long_walk_the_engine_rests_before_the_next_and_nobody_is_forgotten() -> None:
    world = timed_engine(max_running_requests=1)
    for number in range(100):
        world.send([number] * 30, max_new_tokens=20, ignore_eos=True)
    world.step(check=False)
    service = world.engine.services.deadlines
    walks = num_walks(world)
    world.send([7] * 5, max_new_tokens=2, ttft_ms=900_000)
    assert walks() == 1
    world.send([8] * 5, max_new_tokens=2, ttft_ms=900_000)
    hurried = world.send([9] * 5, max_new_tokens=2, ttft_ms=50)
    assert walks() == 0
    rested_s = service.wake_at()
    # Those that wait, the newcomer and the one that runs no more: 101 at most are looked at.
    assert world.time + 99 * REST_S <= rested_s <= world.time + 101 * REST_S
    world.time = rested_s
    assert walks() == 1
    assert service.wake_at() == math.inf
    world.step(check=False)
    assert world.finished[hurried].status == 503
    # A short queue is no reason to wait.
    world.abort(Abort(all=True))
    world.run_dry(check=False)
    world.time += 1.0
    for number in range(3):
        world.send([number] * 5, max_new_tokens=9, ttft_ms=900_000)
        assert walks() == 1
        world.step(check=False)


def test_without_a_queue_nobody_is_refused_and_the_client_is_told_what_is_expected() -> None:
    world = timed_engine(max_running_requests=4)
    told: list[StepOutput] = []
    receive = world.receive
    world.receive = lambda output: (told.append(output), receive(output))[1]  # type: ignore[method-assign]
    id = world.send([7] * 30, max_new_tokens=3, ttft_ms=1_000, ignore_eos=True)
    world.run_dry(check=False)
    assert world.finished[id].status == 200
    warnings = [warning for output in told for warning in output.warnings]
    assert [(warning.id, warning.header) for warning in warnings] == [(id, "wait-ms")]
    low, high = map(int, warnings[0].text.split("-"))
    assert low <= 1_000 * (STEP_S + 30 * TOKEN_S) <= high


def test_before_a_step_has_run_nobody_knows_and_nobody_is_refused() -> None:
    world = EngineWorld(settings(max_slowdown=2.5))
    id = world.send([7] * 30, max_new_tokens=3, ttft_ms=1)
    world.run_dry()
    assert world.finished[id].status == 200
    world.check_outputs()


def test_in_a_pause_nobody_is_refused_or_told_a_time() -> None:
    world = timed_engine(max_running_requests=1)
    told = warnings_of(world)
    world.tell(PauseGeneration(call=1, mode="in_place"))
    id = world.send([7] * 5, max_new_tokens=2, ttft_ms=60_000)
    world.step(check=False)
    assert told == []
    assert world.engine.wait_s > 1
    world.time += 5.0
    world.tell(ContinueGeneration(call=2))
    world.run_dry(check=False)
    assert int(told[0].split("-")[0]) >= 5_000
    assert world.finished[id].status == 200


@pytest.mark.parametrize("ramp_s", [0.0, 1.0])
def test_blocked_requests_are_judged_when_they_are_let_pass(ramp_s: float) -> None:
    world = timed_engine(max_running_requests=1)
    world.tell(BlockInput(call=1))
    late = world.send([7] * 5, max_new_tokens=2, ttft_ms=1_000)
    patient = world.send([7] * 5, max_new_tokens=2, ttft_ms=60_000)
    world.step(check=False)
    assert world.engine.wait_s > 1
    world.time += 5.0
    world.tell(UnblockInput(call=2, ramp_s=ramp_s))
    world.time += 0.8 * ramp_s  # lets the first of both pass
    world.step(check=False)
    assert world.finished[late].status == 503
    world.time += ramp_s
    world.run_dry(check=False)
    assert world.finished[patient].status == 200


def test_the_expected_wait_of_any_request_that_waits_stands_in_its_explanation() -> None:
    world = timed_engine(max_running_requests=1)
    ids = [world.send([n] * 30, max_new_tokens=20, ignore_eos=True) for n in range(6)]
    world.step(check=False)
    waits = []
    for id in ids[1:]:
        reply: Any = world.tell(ExplainRequest(call=1, rid=world.sent[id].rid))
        (found,) = [one for one in reply.found if one.id == id]
        low, likely, high = found.first_token_in_s
        assert low < likely < high
        waits.append(likely)
    assert waits == sorted(waits)
    reply = world.tell(ExplainRequest(call=2, rid=world.sent[ids[0]].rid))
    assert reply.found[0].first_token_in_s is None
    world.run_dry(check=False)


def test_the_engine_visits_no_deadline_when_no_request_has_one() -> None:
    world = timed_engine()
    services = world.engine.services
    assert services.deadlines not in services.core.hooks.attached
    id = world.send([7] * 30, max_new_tokens=3, ttft_ms=9_000)
    assert services.deadlines in services.core.hooks.attached
    world.run_dry(check=False)
    assert world.finished[id].status == 200
    assert services.deadlines not in services.core.hooks.attached


def test_refusals_are_replayed() -> None:
    world = RecordedWorld(settings(max_running_requests=1, max_slowdown=2.5))
    timed(world)
    ids = [world.send([n] * 30, max_new_tokens=10, ignore_eos=True, ttft_ms=400) for n in range(12)]
    world.run_dry(check=False)
    assert {world.finished[id].status for id in ids} == {200, 503}
    world.replay(check=True)


# Estimates


def test_a_band_holds_nine_of_ten_also_where_errors_change() -> None:
    calibration = Calibration()
    for number in range(2_000):
        wave = math.sin(number * 0.7) * 0.5 + math.sin(number / 200) * 0.5
        expected_s = 1.0 + number % 7
        calibration.learn(expected_s, calibration.band(expected_s), expected_s * math.exp(wave))
    assert calibration.num_within / calibration.num_seen >= COVERED
    low_s, likely_s, high_s = calibration.band(2.0)
    assert 0.4 < low_s < likely_s < high_s < 8.0


def test_of_the_waits_of_a_simulated_queue_nine_of_ten_lie_within_the_band(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--requests", "250", "--rate", "14", "--policy", "lpm", "--max-slowdown", "2.5"]
    assert main(["sim", *arguments, "--ttft-ms", "600000"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "within the band that was expected" in line
    assert float(line.split()[1].rstrip("%")) >= 90.0


# Keys


def test_times_of_tenants_are_read_and_mistakes_are_named() -> None:
    assert parse_tenant_ttft("alice=500, bob=2000") == (("alice", 500), ("bob", 2_000))
    assert why_no_ttft("alice=500") == ""
    for bad in ("alice", "alice=", "=2", "alice=0", "alice=soon", "alice=1.5"):
        assert "NAME=MILLISECONDS" in why_no_ttft(bad)
        with pytest.raises(SettingsError, match="--tenant-ttft-ms"):
            parse_tenant_ttft(bad)
