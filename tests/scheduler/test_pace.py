"""The bound on the time between two tokens, on a clock that goes on when a step runs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.scenes import Patience
from tests.scheduler.streams import A, B, C, Streams, seconds
from weft.scheduler.pace.pace import StepBudget
from weft.scheduler.pace.step_cost import CostEstimator, StepLoad


def test_the_cost_of_steps_is_learnt_from_those_that_ran() -> None:
    cost = CostEstimator()
    rng = random.Random(0)
    for _ in range(200):
        start = rng.randrange(2_000)
        length = rng.randrange(1, 500)
        rows = rng.randrange(1, 50)
        prefill = StepLoad(length, length * start + length * (length + 1) // 2)
        decode = StepLoad(rows, rows * rng.randrange(10, 1_000))
        for load, has_prefill in ((prefill, True), (decode, False)):
            took = (A + B * load.tokens + C * load.pairs) * rng.uniform(0.95, 1.05)
            cost.observe(load, took, has_prefill=has_prefill)
    assert cost.seconds(StepLoad(300, 300 * 500)) == pytest.approx(
        A + B * 300 + C * 150_000, rel=0.05
    )
    assert cost.model() == pytest.approx((A, B, 0, 0, C), rel=0.2)


def test_coefficients_are_never_negative_whatever_is_measured() -> None:
    rng = random.Random(1)
    for _ in range(50):
        cost = CostEstimator()
        for _ in range(rng.randrange(1, 12)):
            load = StepLoad(rng.randrange(1, 100), rng.randrange(1, 10_000))
            cost.observe(
                load,
                rng.choice([0.0, -1.0, float("nan"), rng.random()]),
                has_prefill=rng.random() < 0.5,
            )
        assert min(cost.model()) >= 0


def test_a_disturbed_step_is_not_taken_at_its_word_and_a_lasting_change_is() -> None:
    cost = CostEstimator()
    for tokens in range(10, 60):
        cost.observe(StepLoad(tokens, tokens), 0.01 + 0.001 * tokens, has_prefill=True)
        cost.observe(StepLoad(8, 80), 0.02, has_prefill=False)
    usual = cost.seconds(StepLoad(30, 30))
    cost.observe(StepLoad(30, 30), 100.0, has_prefill=True)
    assert cost.seconds(StepLoad(30, 30)) < 1.3 * usual
    for tokens in list(range(10, 60)) * 6:
        cost.observe(StepLoad(tokens, tokens), 3 * (0.01 + 0.001 * tokens), has_prefill=True)
    assert cost.seconds(StepLoad(30, 30)) == pytest.approx(3 * usual, rel=0.2)


@pytest.mark.parametrize("start", [0, 500, 10_000])
def test_a_budget_gives_the_most_tokens_that_fit_into_its_time(start: int) -> None:
    budget = StepBudget(0.05, (B, C), max_tokens=1_000, min_tokens=0)
    n = budget.limit(start)
    assert (
        B * n + C * n * (start + n / 2) <= 0.05 < B * (n + 1) + C * (n + 1) * (start + (n + 1) / 2)
    )
    budget.spend(start, n)
    assert budget.limit(start + n) == 0


@pytest.mark.parametrize(("mixed", "depth"), [(False, 0), (True, 1)])
def test_streams_do_not_freeze_while_long_prompts_keep_coming(mixed: bool, depth: int) -> None:
    longest = {}
    for bound_s in (0.0, 0.05):
        world = Streams(
            depth, max_step_ms=bound_s * 1_000, chunked_prefill_size=1_000, mixed_chunk=mixed
        )
        world.learn()
        stream = world.send([1, 2, 3], max_new_tokens=150, ignore_eos=True)
        while not world.outputs[stream]:
            world.step()
        while stream not in world.finished:
            if len(world.scheduler.waiting_queue) < 2:
                world.send([len(world.sent)] * 900, max_new_tokens=4, ignore_eos=True)
            world.step()
        longest[bound_s] = max(world.longest.values())
        world.run_dry(check=False)
        world.check_outputs()
    assert longest[0.0] > 0.35
    a_decode_step = A + 4 * B + 4 * C * 900
    assert longest[0.05] <= 0.05 + (2 if depth else 1) * a_decode_step


def test_without_running_requests_prompts_take_whole_steps() -> None:
    world = Streams(max_step_ms=20.0, chunked_prefill_size=1_000)
    world.learn()
    world.send([7] * 900, max_new_tokens=2, ignore_eos=True)
    steps = world.num_steps
    while not world.outputs[len(world.sent) - 1]:
        world.step()
    assert world.num_steps - steps == 1


def test_forced_tokens_take_what_prompts_and_own_tokens_leave_of_the_bound() -> None:
    world = Streams(max_slowdown=2.05, mixed_chunk=True)
    pace = world.scheduler.pace
    for tokens in range(10, 60):
        pace.cost.observe(StepLoad(tokens, 0), 0.01 + 0.001 * tokens, has_prefill=True)
        pace.cost.observe(StepLoad(2, 0), 0.012, has_prefill=False)
    columns = world.scheduler.kv.columns
    rows = np.arange(3, dtype=np.int32)
    starts = np.array([50, 50, 50], dtype=np.int32)
    ends = starts + np.array([1, 31, 31], dtype=np.int32)
    columns.known_len[rows] = ends

    def lens(num_before: int) -> list[int]:
        found = pace.forced_ends(rows, starts, ends, num_before) - starts
        return list(found.tolist())

    # Three rows take 13 ms by themselves, so that 13 tokens more may be computed.
    assert lens(0) == [1, 7, 7]
    assert lens(4) == [1, 5, 5]
    assert lens(100) == [1, 1, 1]
    columns.background[0] = True
    assert lens(0) == [1, 31, 31]
    columns.background[0] = False
    ends[2] = 58
    columns.known_len[2] = 58
    assert lens(0) == [1, 7, 8], "a rest of one token would be taken for a sampled one"
    columns.known_len[2] = 57
    assert lens(0) == [1, 14, 8], "its last token is not known yet"


def test_prompts_go_on_however_small_the_bound_is() -> None:
    world = Streams(max_step_ms=0.001, chunked_prefill_size=1_000)
    world.learn()
    world.send([1, 2], max_new_tokens=400, ignore_eos=True)
    world.step()
    late = world.send([7] * 300, max_new_tokens=2, ignore_eos=True)
    for _ in range(2 * 300 // 8 + 6):
        world.step()
    assert world.outputs[late]


def test_before_anything_is_known_steps_grow_with_what_has_been_measured() -> None:
    world = Streams(max_step_ms=10000.0, chunked_prefill_size=1_000)
    world.send([1, 2], max_new_tokens=100, ignore_eos=True)
    world.step()
    world.send([7] * 900, max_new_tokens=2, ignore_eos=True)
    lens = []
    launch = world.runner.launch
    world.runner.launch = lambda plan: (lens.append(plan.num_tokens), launch(plan))[1]  # type: ignore[method-assign]
    while sum(lens) < 900:
        world.step()
    assert [n for n in lens if n > 1][:4] == [64, 128, 256, 452]


def test_a_request_does_not_wait_after_its_last_token() -> None:
    """So a prompt is not cut for it."""
    world = Streams(1, max_step_ms=20.0, chunked_prefill_size=1_000)
    world.learn()
    stream = world.send([1, 2], max_new_tokens=5, ignore_eos=True)
    columns = world.scheduler.kv.columns
    while (
        not world.scheduler.requests[stream].row >= 0
        or columns.seq_len[world.request(stream).row] < 7
    ):
        world.step()
    assert stream not in world.finished
    world.send([7] * 900, max_new_tokens=2, ignore_eos=True)
    world.step()
    assert world.scheduler.last_batch is not None
    assert world.scheduler.last_batch.plan.num_tokens == 900


def test_between_decode_steps_no_prompt_is_cut_into_tiny_pieces() -> None:
    world = Streams(max_step_ms=50.0, chunked_prefill_size=44)  # leaves time for 11 tokens
    world.let_steps_cost(lambda plan: B * plan.num_tokens)  # besides the cost of before
    world.learn()
    world.send([1, 2], max_new_tokens=400, ignore_eos=True)
    for _ in range(3):
        world.step()
    rng = random.Random(0)
    num_cut = 0
    while num_cut < 20:
        if not world.scheduler.waiting_queue:
            world.send(
                [len(world.sent)] * rng.randrange(100, 400), max_new_tokens=2, ignore_eos=True
            )
        world.step()
        batch = world.scheduler.last_batch
        if batch is not None and batch.prefills and not batch.prefills[-1].completes:
            num_cut += 1
            assert batch.plan.num_tokens >= 16


def streaming(world: Streams, num: int) -> list[int]:
    """So many requests decode, and the cost of steps is known."""
    world.learn()
    streams = [world.send([50 + i] * 3, max_new_tokens=150, ignore_eos=True) for i in range(num)]
    while not all(world.outputs[id] for id in streams):
        world.step()
    world.step()
    return streams


def next_step_s(world: Streams) -> float:
    world.step()
    assert world.scheduler.last_batch is not None
    return seconds(world.scheduler.last_batch.plan)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_later_prompts_slow_streams_down_by_no_more_than_they_may(mixed: bool, depth: int) -> None:
    world = Streams(depth, max_slowdown=3.0, chunked_prefill_size=1_000, mixed_chunk=mixed)
    streams = streaming(world, 8)
    world.longest.clear()
    for _ in range(2):
        world.send([len(world.sent)] * 900, max_new_tokens=4, ignore_eos=True)
    while not all(id in world.finished for id in streams):
        world.step()
    # Of eight to ten requests with at most 150 tokens behind prompts of 3 and 900.
    a_decode_step = A + 10 * B + C * (8 * 150 + 2 * 900)
    assert max(world.longest[id] for id in streams) <= (4.5 if depth else 3.5) * a_decode_step
    world.run_dry(check=False)
    world.check_outputs()


def test_a_bound_by_slowdown_is_never_below_what_a_reader_can_follow() -> None:
    world = Streams(max_slowdown=1.5, chunked_prefill_size=1_000, mixed_chunk=True)
    streaming(world, 1)
    world.send([7] * 900, max_new_tokens=4, ignore_eos=True)
    world.step()
    assert next_step_s(world) == pytest.approx(0.01, rel=0.1)


def test_prompts_that_came_before_a_request_had_begun_are_not_cut_for_it() -> None:
    """So a burst is soon in one batch."""
    lens = {}
    for max_slowdown in (-1.0, 2.5):
        world = Streams(max_slowdown=max_slowdown, chunked_prefill_size=256)
        world.learn()
        for number in range(6):
            world.send([50 + number] * 200, max_new_tokens=60, ignore_eos=True)
        lens[max_slowdown] = [world.step_len() for _ in range(6)]
    assert lens[2.5] == lens[-1.0]


def test_an_open_prompt_is_cut_for_a_stream_that_comes_later() -> None:
    world = Streams(max_slowdown=2.5, chunked_prefill_size=400)
    world.learn()
    prompt = world.send([7] * 1_900, max_new_tokens=4, ignore_eos=True)
    for _ in range(2):
        world.step()
    assert not world.outputs[prompt]
    world.send([8] * 3, max_new_tokens=100, ignore_eos=True)
    while len(world.outputs) < 2 or not world.outputs[max(world.outputs)]:
        world.step()
    world.step()
    assert world.step_len() < 100
    world.run_dry(check=False)
    world.check_outputs()


def test_a_prompt_that_could_not_run_before_is_cut_for_streams_that_came_meanwhile() -> None:
    """It has waited for its grammar, for example."""
    patience = Patience()
    patience.is_over = True
    world = Streams(max_slowdown=2.5, chunked_prefill_size=400, features=(patience,))
    world.learn()
    patience.is_over = False
    if not len(world.sent) % 2:
        world.send([9] * 3, max_new_tokens=1, ignore_eos=True)
    prompt = world.send([7] * 1_900, max_new_tokens=4, ignore_eos=True)
    assert world.request(prompt).id % 2
    stream = world.send([8] * 3, max_new_tokens=100, ignore_eos=True)
    while len(world.outputs[stream]) < 3:
        world.step()
    patience.is_over = True
    assert max(world.step_len() for _ in range(4)) < 100
    world.run_dry(check=False)
    world.check_outputs()


def test_the_more_prompts_wait_the_longer_a_step_may_take() -> None:
    took = {}
    for num_prompts in (2, 4, 16):
        world = Streams(
            max_slowdown=2.5, chunked_prefill_size=1_000, mixed_chunk=True, num_pages=20_000
        )
        streaming(world, 4)
        for number in range(num_prompts):
            world.send([50 + number] * 900, max_new_tokens=4, ignore_eos=True)
        world.step()
        took[num_prompts] = next_step_s(world)
    assert took[2] == pytest.approx(took[4], rel=0.2)
    assert took[16] > 2 * took[4]


def test_requests_that_are_blocked_make_no_step_longer() -> None:
    took = {}
    for num_blocked in (0, 40):
        world = Streams(
            max_slowdown=2.5, chunked_prefill_size=1_000, mixed_chunk=True, num_pages=20_000
        )
        streaming(world, 4)
        for number in range(2):
            world.send([50 + number] * 900, max_new_tokens=4, ignore_eos=True)
        num_requests = world.scheduler.counters.num_requests
        world.scheduler.waiting_queue.block(num_requests, "the input is blocked")
        for number in range(num_blocked):
            world.send([100 + number] * 900, max_new_tokens=4, ignore_eos=True)
        world.step()
        took[num_blocked] = next_step_s(world)
    assert took[40] == took[0]


def test_a_prompt_that_is_let_pass_later_is_cut_for_those_before_it() -> None:
    world = Streams(max_slowdown=2.5, chunked_prefill_size=1_000, mixed_chunk=True)
    world.learn()
    first = world.scheduler.counters.num_requests
    gate = world.scheduler.waiting_queue.block(first, "the input is blocked")
    world.send([5] * 3, max_new_tokens=100, ignore_eos=True)
    world.send([6] * 900, max_new_tokens=4, ignore_eos=True)
    gate.open_until(first + 1)
    for _ in range(5):
        world.step()
    gate.open_until(first + 2)
    assert max(world.step_len() for _ in range(3)) < 300
