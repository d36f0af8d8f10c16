"""Background requests: they get what online requests leave, and give it back at once."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.random_worlds import run_random
from tests.scheduler.scenes import Patience, Recorder, settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import chosen
from weft.arrays import IntArray
from weft.engine.explain import explain
from weft.plan.step import Plan
from weft.scheduler.background.turns import BackgroundTurns
from weft.scheduler.request import NO_ROW, Columns, RequestState
from weft.scheduler.retraction import cheapest
from weft.scheduler.settings import DraftSettings
from weft.scheduler.speculation.planner import SpeculativePlanner

# Each feature is in one or two of them.
WORLDS = (1, 2, 3, 4, 6, 7, 10, 11)


def decoding(world: World) -> set[int]:
    """The requests that decode."""
    requests = world.scheduler.requests.values()
    return {one.id for one in requests if one.state is RequestState.DECODING}


def has_row(world: World, id: int) -> bool:
    return world.request(id).row != NO_ROW


def wait_for(world: World, id: int) -> None:
    """Run steps until the request decodes."""
    while id not in decoding(world):
        world.step()


def line(length: int, first: int = 0) -> list[int]:
    """A prompt of this length that begins with its own token."""
    return [first, *range(1, length)]


# Who is first


def test_an_online_request_goes_before_background_requests_that_came_earlier() -> None:
    world = World(settings(max_running_requests=1))
    running = world.send(line(4), max_new_tokens=3, ignore_eos=True)
    world.step()
    background = world.send(line(4, 1), max_new_tokens=3, ignore_eos=True, background=True)
    online = world.send(line(4, 2), max_new_tokens=3, ignore_eos=True)
    order = [one.id for one in world.scheduler.waiting_queue.order(world.time)]
    assert order == [online, background]
    world.run_dry()
    assert list(world.finished) == [running, online, background]


@pytest.mark.parametrize(
    "policy", ["fcfs", "lpm", "priority", "fair", "priority > fair(key) > lpm"]
)
def test_no_policy_and_no_priority_puts_a_background_request_first(policy: str) -> None:
    world = World(settings(max_running_requests=1, schedule_policy=policy))
    world.send(line(40), max_new_tokens=1, ignore_eos=True)
    world.run_dry()
    # Its prefix is cached, its tenant was not served yet, and its priority is the highest.
    background = world.send(
        line(40), max_new_tokens=1, background=True, priority=90, user="another"
    )
    online = world.send(line(9, 3), max_new_tokens=1)
    world.run_dry()
    assert list(world.finished)[1:] == [online, background]


def test_no_age_puts_a_background_request_before_an_online_one() -> None:
    world = World(settings(max_running_requests=1, aging_s=5.0))
    background = world.send(line(4, 1), max_new_tokens=2, ignore_eos=True, background=True)
    online = [world.send(line(4, i), max_new_tokens=2, ignore_eos=True) for i in range(2, 9)]
    world.time += 100.0
    world.run_dry()
    assert list(world.finished) == [*online, background]


def test_a_flood_of_background_requests_fills_no_online_place_in_the_queue() -> None:
    world = World(settings(max_running_requests=1, max_queued_requests=3))
    flood = [world.send(line(4, i), max_new_tokens=4, background=True) for i in range(9)]
    online = [world.send(line(4, i), max_new_tokens=4) for i in range(4)]
    world.run_dry()
    refused = [id for id, end in world.finished.items() if end.status == 503]
    assert refused == flood[4:]  # as many wait as may, and one will have the row
    assert all(world.finished[id].reason != "error" for id in online)


# Its row and its memory


def test_a_background_request_gives_its_row_to_an_online_one_within_a_step() -> None:
    world = World(settings(max_running_requests=2))
    background = [
        world.send(line(6, i), max_new_tokens=30, ignore_eos=True, background=True)
        for i in range(2)
    ]
    for _ in range(4):
        world.step()
    assert decoding(world) == set(background)
    online = world.send(line(6, 5), max_new_tokens=3, ignore_eos=True)
    world.step()
    assert has_row(world, online)
    # The other one goes on.
    assert sum(has_row(world, id) for id in background) == 1
    world.run_dry()
    lost = next(id for id in background if world.finished[id].retractions)
    explanation = explain(world.scheduler, lost, world.time)
    assert explanation is not None
    assert any("an online request takes its place" in one.what for one in explanation.timeline)


def test_an_online_request_that_needs_all_memory_takes_it() -> None:
    """It fits alone, but not beside what others are expected to need."""
    world = World(settings(num_pages=90, max_running_requests=4, context_length=90))
    background = [
        world.send(line(20, i), max_new_tokens=9, ignore_eos=True, background=True)
        for i in range(2)
    ]
    world.step()
    world.step()
    assert any(has_row(world, id) for id in background)
    online = world.send(line(60, 7), max_new_tokens=25, ignore_eos=True)
    world.step()
    assert has_row(world, online)
    assert not any(has_row(world, id) for id in background)
    world.run_dry()


def test_an_open_background_prompt_makes_way() -> None:
    world = World(settings(chunked_prefill_size=16))
    background = world.send(line(120), max_new_tokens=2, background=True)
    world.step()
    chunk = world.scheduler.prefills.chunked_req
    assert chunk is not None
    assert chunk.id == background
    online = world.send(line(40, 9), max_new_tokens=2)
    world.step()
    chunk = world.scheduler.prefills.chunked_req
    assert chunk is not None
    assert chunk.id == online
    world.run_dry()
    assert list(world.finished) == [online, background]


def test_when_memory_runs_out_background_requests_are_retracted_first() -> None:
    world = World(settings())
    online = world.send(line(9), max_new_tokens=9, ignore_eos=True)
    background = world.send(line(90, 1), max_new_tokens=90, ignore_eos=True, background=True)
    world.step()
    world.step()
    requests = [world.request(online), world.request(background)]
    rank = world.scheduler.waiting_queue.rank
    assert cheapest(requests, world.scheduler.kv, 1, rank).id == background


def test_it_does_not_take_what_an_online_request_waits_for() -> None:
    """An online request that does not fit ends the pass, also for small background requests."""
    world = World(settings(num_pages=100, context_length=100))
    world.send(line(50), max_new_tokens=40, ignore_eos=True)
    world.step()
    waits = world.send(line(50, 1), max_new_tokens=40, ignore_eos=True)
    background = world.send(line(2, 2), max_new_tokens=2, ignore_eos=True, background=True)
    for _ in range(10):
        world.step()
    assert not has_row(world, waits)
    assert not has_row(world, background)
    world.run_dry()


def test_an_online_request_that_is_not_ready_stops_no_background_request() -> None:
    patience = Patience()
    world = World(settings(), features=(patience,))
    background = world.send(line(4), max_new_tokens=2, ignore_eos=True, background=True)
    waits = world.send(line(4, 1), max_new_tokens=2, ignore_eos=True)  # an odd number
    world.step()
    world.step()
    assert background in world.finished or has_row(world, background)
    patience.is_over = True
    world.run_dry()
    assert waits in world.finished


# Its time


def seconds(plan: Plan) -> float:
    """10 ms, and 1 ms for each token; 1 ms for each pass of a draft model."""
    if plan.drafting is not None:
        return 0.001 * int(plan.drafting.counts.max(initial=1))
    return 0.010 + 0.001 * plan.num_tokens


def timed(**changes: object) -> Recorder:
    usual = {"mixed_chunk": True, "max_slowdown": 2.0, "page_size": 4}
    world = Recorder(settings(**usual | changes))
    world.let_steps_cost(seconds)
    # The cost becomes known.
    world.send(line(30), max_new_tokens=9, ignore_eos=True)
    world.run_dry()
    world.send(line(60, 1), max_new_tokens=9, ignore_eos=True)
    world.run_dry()
    world.plans.clear()
    return world


def online_steps(world: Recorder, online: int) -> list[Plan]:
    """The steps in which the online request decodes."""
    return online_plans(world, world.request(online).row)


def online_plans(world: Recorder, row: int) -> list[Plan]:
    return [plan for plan in world.plans if row in plan.rows.tolist() and len(plan.tokens) > 0]


def predicted(world: World, prompt: list[int], length: int, *, background: bool = False) -> int:
    """A request whose client knows all of its output before."""
    return world.send(
        prompt,
        max_new_tokens=length,
        ignore_eos=True,
        background=background,
        prediction=expected_output(prompt, length, VOCAB, set()),
    )


def decoding_lines(world: World, num: int, *, length: int) -> list[int]:
    """So many background requests, all of which decode."""
    background = [
        world.send(line(4, i + 10), max_new_tokens=length, ignore_eos=True, background=True)
        for i in range(num)
    ]
    while len(decoding(world)) < num:
        world.step()
    return background


@pytest.mark.parametrize("max_slowdown", [2.0, -1.0])
def test_while_an_online_request_decodes_only_so_many_background_rows_join_as_it_has_time_for(
    max_slowdown: float,
) -> None:
    world = timed(max_running_requests=16, background_slowdown=1.3, max_slowdown=max_slowdown)
    background = decoding_lines(world, 12, length=60)
    online = world.send(line(4, 7), max_new_tokens=20, ignore_eos=True)
    wait_for(world, online)
    world.step()
    world.plans.clear()
    for _ in range(10):
        world.step()
    # Alone a step of one row takes 11 ms; for a third of that two or three others join.
    assert {len(plan.rows) for plan in online_steps(world, online)} <= {3, 4}
    # The others have lost nothing.
    assert decoding(world) == {*background, online}
    world.run_dry()
    assert not any(world.finished[id].retractions for id in background)


def test_drafts_of_online_requests_go_before_background_rows_and_keep_to_the_time() -> None:
    world = timed(
        max_running_requests=16,
        background_slowdown=2.0,
        speculative="prediction",
        context_length=256,
        num_pages=500,
    )
    for i in range(12):
        predicted(world, line(4, i + 10), 150, background=True)
    while len(decoding(world)) < 12:
        world.step()
    online = predicted(world, line(4, 7), 80)
    wait_for(world, online)
    row = world.request(online).row
    world.plans.clear()
    while online in decoding(world):
        world.step()
    assert world.outputs[online] == expected_output(line(4, 7), 80, VOCAB, set())
    beside = [plan for plan in online_plans(world, row) if len(plan.rows) > 1]
    drafted = [plan.drafts[plan.rows == row] for plan in beside if plan.drafts is not None]
    assert len(drafted) >= 6
    assert min(drafted) >= 4
    for plan in beside:
        # The bound is twice what the tokens of the online request and a step take, 38 ms.
        assert plan.num_tokens <= 28
        assert len(plan.rows) < 12
    world.run_dry()


@pytest.mark.parametrize("background", [True, False])
def test_prompts_leave_the_drafts_of_online_requests_their_time(background: bool) -> None:
    """Prompts of online requests may take what those of background requests may."""
    world = timed(background_slowdown=3.0, speculative="prediction")
    online = predicted(world, line(4, 7), 80)
    wait_for(world, online)
    world.send(line(120, 8), max_new_tokens=2, background=True)
    world.send(line(120, 9), max_new_tokens=2, background=background)
    world.step()
    pace = world.scheduler.pace
    assert pace.room is not None
    num_beside = 0
    while online in decoding(world):
        bound_s = pace.room.bound_s(pace.cost.model())
        world.step()
        plan = world.plans[-1]
        assert seconds(plan) <= bound_s
        num_beside += plan.drafts is not None and len(plan.rows) > 1
    assert num_beside >= 3
    world.run_dry()


def test_guesses_of_background_requests_that_no_step_has_time_for_are_not_taken_for_wrong() -> None:
    draft = DraftSettings(vocab_size=VOCAB, context_length=1_000)
    world = timed(
        max_running_requests=16, background_slowdown=4.0, speculative="draft", draft=draft
    )
    assert world.runner.draft is not None
    world.runner.draft.wrong_every = 0
    background = decoding_lines(world, 5, length=190)
    online = world.send(line(4, 7), max_new_tokens=60, ignore_eos=True)
    wait_for(world, online)
    while online in decoding(world):
        world.step()
    planner = world.scheduler.planner
    assert isinstance(planner, SpeculativePlanner)
    for id in background:
        [rate] = planner._speculator.trust(world.request(id).row).rates
        assert rate.value(0.5, 1.0) > 0.8
    world.run_dry()


def test_without_online_rows_all_background_rows_decode() -> None:
    world = timed(max_running_requests=16)
    for i in range(12):
        world.send(line(4, i + 10), max_new_tokens=30, ignore_eos=True, background=True)
    while len(decoding(world)) < 12:
        world.step()
    world.step()
    assert len(world.plans[-1].rows) == 12
    world.run_dry()


def test_a_background_prompt_is_cut_to_the_time_that_is_left_beside_an_online_request() -> None:
    world = timed(background_slowdown=2.0, chunked_prefill_size=64)
    online = world.send(line(4, 7), max_new_tokens=40, ignore_eos=True)
    wait_for(world, online)
    world.send(line(60, 9), max_new_tokens=2, ignore_eos=True, background=True)
    world.plans.clear()
    world.run_dry()
    sizes = [plan.num_tokens for plan in world.plans if len(plan.rows) > 1]
    assert sizes
    assert max(sizes) <= 12  # at most as long again as a step of 11 ms


def test_beside_an_online_prompt_background_rows_take_only_the_time_it_leaves() -> None:
    world = timed(max_running_requests=16, background_slowdown=2.0, chunked_prefill_size=64)
    for i in range(8):
        world.send(line(4, i + 10), max_new_tokens=60, ignore_eos=True, background=True)
    while len(decoding(world)) < 8:
        world.step()
    online = world.send(line(4, 7), max_new_tokens=40, ignore_eos=True)
    wait_for(world, online)
    world.plans.clear()
    world.send(line(12, 9), max_new_tokens=2, ignore_eos=True)
    world.step()
    world.step()
    beside = [plan for plan in world.plans if plan.num_tokens > len(plan.rows)]
    assert beside
    for plan in beside:
        # The bound is twice a step of 11 ms: 12 tokens, of prompts first.
        assert plan.num_tokens <= 13
    world.run_dry()


def test_while_background_requests_wait_an_online_prompt_may_take_what_they_may() -> None:
    sizes = []
    for has_background in (False, True):
        world = timed(max_running_requests=2, background_slowdown=3.0, chunked_prefill_size=64)
        online = world.send(line(4, 7), max_new_tokens=40, ignore_eos=True)
        wait_for(world, online)
        if has_background:
            world.send(line(90, 8), max_new_tokens=2, ignore_eos=True, background=True)
        world.send(line(60, 9), max_new_tokens=2, ignore_eos=True)
        world.plans.clear()
        world.step()
        world.step()
        sizes.append(max(plan.num_tokens for plan in world.plans))
        world.run_dry()
    alone, beside = sizes
    assert alone < beside


def test_prompts_go_before_background_rows_until_these_can_fill_a_step() -> None:
    """With prompts of online requests no prompt of theirs is computed, so rows must be there."""
    world = timed(max_running_requests=16, background_slowdown=2.0, chunked_prefill_size=64)
    online = world.send(line(4, 7), max_new_tokens=60, ignore_eos=True)
    wait_for(world, online)
    background = [
        world.send(line(6, i + 10), max_new_tokens=40, ignore_eos=True, background=True)
        for i in range(15)
    ]
    world.plans.clear()
    while len(decoding(world)) < 10:
        world.step()
    # Every step has prompts, so it has the rows of the others only as far as time is left.
    assert all(plan.num_tokens > len(plan.rows) for plan in world.plans)
    assert not set(background) & set(world.finished)
    world.run_dry()


def test_without_online_rows_background_prompts_and_rows_share_steps() -> None:
    world = timed(max_running_requests=16, chunked_prefill_size=64)
    first = world.send(line(4, 7), max_new_tokens=40, ignore_eos=True, background=True)
    wait_for(world, first)
    world.send(line(20, 9), max_new_tokens=2, ignore_eos=True, background=True)
    world.plans.clear()
    world.step()
    assert [len(plan.rows) for plan in world.plans] == [2]
    world.run_dry()


def test_the_first_steps_of_all_show_a_batch_what_steps_cost() -> None:
    world = Recorder(
        settings(mixed_chunk=True, max_slowdown=2.0, page_size=4, chunked_prefill_size=64)
    )
    world.let_steps_cost(seconds)
    for i in range(6):
        world.send(line(60, i), max_new_tokens=9, ignore_eos=True, background=True)
    world.run_dry()
    sizes = [plan.num_tokens for plan in world.plans]
    # Of 50 ms, as soon as a step with prompts and one without have run.
    assert sizes[:2] == [64, 1]
    assert max(sizes[2:]) <= 40


@pytest.mark.parametrize("others", [0, 1])
def test_before_any_request_has_decoded_a_background_prompt_is_computed(others: int) -> None:
    world = Recorder(settings(mixed_chunk=True, max_slowdown=2.0, chunked_prefill_size=64))
    world.let_steps_cost(seconds)
    for i in range(others):
        world.send(line(20, i), max_new_tokens=1, ignore_eos=True)
        world.run_dry()
    world.send(line(120, 9), max_new_tokens=2, ignore_eos=True, background=True)
    world.run_dry()
    assert len(world.finished) == others + 1


@pytest.mark.parametrize("max_slowdown", [2.0, -1.0])
@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_alone_a_background_prompt_is_cut_so_that_an_arrival_waits_no_longer(
    max_slowdown: float, mixed_chunk: bool
) -> None:
    world = timed(
        background_step_ms=30.0,
        chunked_prefill_size=64,
        max_slowdown=max_slowdown,
        mixed_chunk=mixed_chunk,
    )
    world.send(line(120, 9), max_new_tokens=2, ignore_eos=True, background=True)
    world.run_dry()
    sizes = [plan.num_tokens for plan in world.plans]
    assert max(sizes) == 20


def test_alone_pieces_of_background_prompts_are_long_whatever_rows_decode() -> None:
    """Their rows have no part in such a step, and nobody waits for these."""
    world = timed(
        background_step_ms=30.0, chunked_prefill_size=64, max_running_requests=16, mixed_chunk=False
    )
    decoding_lines(world, 12, length=60)
    world.plans.clear()
    world.send(line(120, 9), max_new_tokens=2, ignore_eos=True, background=True)
    for _ in range(6):
        world.step()
    assert min(plan.num_tokens for plan in world.plans) >= 16
    world.run_dry()


def test_before_costs_are_known_they_rest_while_an_online_request_decodes() -> None:
    world = Recorder(settings(max_slowdown=-1.0, speculative="off"))
    background = world.send(line(4), max_new_tokens=30, ignore_eos=True, background=True)
    world.step()
    world.step()
    online = world.send(line(4, 1), max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    world.plans.clear()
    world.step()
    assert [len(plan.rows) for plan in world.plans] == [1]
    world.run_dry()
    assert list(world.finished) == [online, background]


def test_time_limits_of_the_server_are_for_online_requests() -> None:
    world = World(settings(max_running_requests=1, max_queue_s=5.0, max_run_s=5.0))
    world.send(line(4), max_new_tokens=30, ignore_eos=True)
    background = world.send(line(4, 1), max_new_tokens=30, ignore_eos=True, background=True)
    limited = world.send(line(4, 2), max_new_tokens=3, background=True, timeout_ms=2_000)
    world.time += 20.0
    world.run_dry()
    assert world.finished[background].reason == "length"
    assert world.finished[limited].reason in ("abort", "error")


# Its order


def test_in_its_line_a_background_request_ages_after_an_hour() -> None:
    """Its tenant was served so much that the order itself would let it wait."""
    for waited_s, comes_first in ((3_500.0, False), (3_700.0, True)):
        world = World(settings(max_running_requests=1, background_policy="priority", aging_s=5.0))
        world.send(line(4), max_new_tokens=9, ignore_eos=True)
        world.step()
        old = world.send(line(4, 1), max_new_tokens=2, background=True)
        world.time += waited_s
        for i in range(2, 6):
            world.send(line(4, i), max_new_tokens=2, background=True, priority=9)
        world.run_dry()
        ended = [id for id in world.finished if world.sent[id].background]
        assert (ended.index(old) < len(ended) - 1) == comes_first


def test_background_requests_with_one_prefix_run_one_after_the_other() -> None:
    world = World(settings(max_running_requests=1, background_policy="dfs-weight"))
    families = [[*range(20)], [*range(30, 50)]]
    sent = [
        world.send([*families[i % 2], 100 + i], max_new_tokens=1, background=True) for i in range(8)
    ]
    world.run_dry()
    order = [sent.index(id) % 2 for id in world.finished]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes <= 2


def test_what_background_requests_leave_in_the_cache_is_evicted_first() -> None:
    world = World(settings(num_pages=100, max_running_requests=1))
    chat = line(30)
    world.send(chat, max_new_tokens=1)
    world.run_dry()
    for number in range(1, 9):
        world.send(line(30, number), max_new_tokens=9, ignore_eos=True, background=True)
        world.run_dry()
    assert world.scheduler.stats().total_evicted_tokens > 0
    again = world.send([*chat, 5], max_new_tokens=1)
    world.run_dry()
    assert world.finished[again].cached_tokens == 30


def test_background_requests_are_not_before_an_online_one_in_the_queue() -> None:
    world = World(settings(max_running_requests=1))
    for i in range(3):
        world.send(line(4, i), max_new_tokens=2, background=True)
    online = world.send(line(4, 9), max_new_tokens=2)
    last = world.send(line(4, 8), max_new_tokens=2, background=True)
    for id, arrival in (
        (online, "4 prompt tokens"),
        (last, "4 before it in the queue; background"),
    ):
        explanation = explain(world.scheduler, id, world.time)
        assert explanation is not None
        assert explanation.timeline[0].what.endswith(arrival)
        assert explanation.service == ("online" if id == online else "background")
    world.run_dry()


def test_why_a_background_request_waits() -> None:
    world = World(settings(max_running_requests=4))
    background = world.send(line(4), max_new_tokens=2, background=True)
    world.send(line(4, 1), max_new_tokens=2)
    world.step()
    explanation = explain(world.scheduler, background, world.time)
    assert explanation is not None
    assert "background" in explanation.why
    world.run_dry()


# Random worlds


@cache
def random_world(seed: int) -> Counter[str]:
    """What a world reaches in which every invariant has been checked after every step."""
    world = run_random(
        seed,
        background=True,
        drafts=seed % 5 == 1 and seed % 8 < 6,
        windows=seed % 7 == 2,
        states=seed % 7 == 3,
        pins=seed % 6 == 4,
        composed=seed % 3 == 2,
        switches=seed % 4 == 1,
        splits=seed % 8 == 6,
        num_stages=2 if seed % 8 == 7 else 1,
    )
    if seed % 4 == 0:
        world.replay()
    found = Counter[str]()
    for id, request in world.sent.items():
        kind = "background" if request.background else "online"
        end = world.finished[id]
        found[f"{kind} {end.reason}"] += 1
        found[f"{kind} retracted"] += end.retractions
    return found


@pytest.mark.parametrize("seed", chosen(WORLDS, range(24)))
def test_random_worlds_with_background_requests_keep_every_invariant(seed: int) -> None:
    random_world(seed)


def test_the_random_worlds_reach_what_they_are_for() -> None:
    reached = Counter[str]()
    for seed in WORLDS:
        reached += random_world(seed)
    for kind in ("background", "online"):
        assert reached[f"{kind} stop"] > 5
        assert reached[f"{kind} length"] > 20
    assert reached["background retracted"] > 2 * reached["online retracted"] > 0


def test_in_random_worlds_with_dear_tokens_rows_rest_for_the_guesses_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows = num_drafts = 0
    beside_drafts = BackgroundTurns.beside_drafts

    def counted(
        turns: BackgroundTurns, columns: Columns, rows: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        nonlocal num_rows, num_drafts
        num_rows += len(rows)
        num_drafts += int(counts.sum())
        rows, counts = beside_drafts(turns, columns, rows, counts)
        num_rows -= len(rows)
        num_drafts -= int(counts.sum())
        return rows, counts

    monkeypatch.setattr(BackgroundTurns, "beside_drafts", counted)
    for seed in (98, 106):
        run_random(seed, background=True, drafts=True, dear_tokens=True)
    assert num_rows > 20
    assert num_drafts > 100
