from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.scene import SCENE
from weft.scheduler.pace.step_cost import CostModel
from weft.sim.cost import PRESETS
from weft.sim.outcome import DONE, OPEN, REFUSED
from weft.sim.report import Slo, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import Traffic, at_once, synthetic
from weft.sim.trace import OUTPUT, Arrival, Segment

SETTINGS = replace(SCENE, num_pages=4_000, context_length=2_048, chunked_prefill_size=512)
STEP = CostModel(1.0, 0.0, 0.0)  # every step takes a second


def one(time_s: float, output_len: int, key: int = 0, after: int = -1) -> Arrival:
    return Arrival(time_s, (Segment(key, 20),), output_len, 100, after=after)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_request_takes_a_step_for_each_token(overlap: bool) -> None:
    record = simulate(SETTINGS, STEP, [one(3.0, 5)], overlap=overlap)
    assert record.sent_s[0] == 3.0
    assert record.first_s[0] == 4.0
    assert record.end_s[0] == 8.0
    assert record.prompt_len[0] == 20
    assert record.output_len[0] == 5
    assert record.state[0] == DONE
    assert record.gaps.percentile(50) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_for_no_token_costs_its_prompt(overlap: bool) -> None:
    silent = one(3.0, 0)._replace(max_new_tokens=0)
    record = simulate(SETTINGS, STEP, [silent, one(3.0, 2, key=1)], overlap=overlap)
    assert record.end_s[0] == 4.0
    assert record.output_len[0] == 0
    assert record.state[0] == DONE
    summary = summarize(record, Slo(1.0, 1.0))
    assert summary.ttft_s[2] == pytest.approx(1.0, rel=0.01)
    assert summary.good_share == 1.0


def test_cost_counts_tokens_context_and_samples() -> None:
    cost = CostModel(10.0, 1.0, 0.01, 100.0)
    record = simulate(SETTINGS, cost, [one(0.0, 2)], overlap=False)
    prefill = 10 + 20 * 1 + 20 * 0.01 + 100
    decode = 10 + 1 + 21 * 0.01 + 100
    assert record.first_s[0] == pytest.approx(prefill)
    assert record.end_s[0] == pytest.approx(prefill + decode)


def test_the_scheduler_does_not_know_the_output_length() -> None:
    record = simulate(
        SETTINGS, STEP, [one(0.0, 7, key=1), one(0.0, 100, key=2), one(0.0, 300, key=3)]
    )
    assert record.output_len.tolist() == [7, 100, 100]  # the last is cut by max_new_tokens


def test_requests_run_together() -> None:
    record = simulate(SETTINGS, STEP, at_once([(20, 10)] * 8), overlap=False)
    assert set(record.end_s.tolist()) == {10.0}
    assert record.machine.meter.mean_rows == 8


def test_equal_prefixes_are_computed_once() -> None:
    shared = Segment(1, 320)
    arrivals = [Arrival(100.0 * i, (shared, Segment(10 + i, 16)), 2, 2) for i in range(3)]
    assert simulate(SETTINGS, STEP, arrivals).cached_len.tolist() == [0, 320, 320]


def test_next_turn_comes_after_the_answer_and_finds_it_in_the_cache() -> None:
    first = one(0.0, 12)
    second = Arrival(5.0, (Segment(0, 20), Segment(OUTPUT, 12), Segment(9, 30)), 3, 100, after=0)
    record = simulate(SETTINGS, STEP, [first, second], overlap=False)
    assert record.end_s[0] == 12.0
    assert record.sent_s[1] == 17.0
    assert record.cached_len[1] == 16  # of 31 tokens with K and V the whole pages


def test_a_turn_that_follows_later_requests_in_the_trace_is_an_error_and_not_late() -> None:
    trace = [one(0.0, 2), one(900.0, 2, key=1), one(1.0, 2, key=2, after=0)]
    with pytest.raises(AssertionError, match="request 2 stands too late in the trace"):
        simulate(SETTINGS, STEP, trace)
    in_order = [trace[0], trace[2], trace[1]]
    assert simulate(SETTINGS, STEP, in_order).sent_s[1] < 10


def test_turn_of_a_refused_request_still_comes() -> None:
    too_long = Arrival(0.0, (Segment(0, 5_000),), 1, 1)
    record = simulate(SETTINGS, STEP, [too_long, one(1.0, 2, after=0)])
    assert record.state.tolist() == [REFUSED, DONE]


def test_time_jumps_over_idle_stretches() -> None:
    record = simulate(SETTINGS, STEP, [one(0.0, 2), one(1e6, 2, key=1)])
    assert record.end_s[1] == 1e6 + 2
    assert record.machine.meter.busy_s < 10


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [
        ("fcfs", False),
        ("lpm", True),
        pytest.param("fcfs", True, marks=pytest.mark.slow),
        pytest.param("lpm", False, marks=pytest.mark.slow),
    ],
)
def test_every_request_gets_its_output_when_memory_is_short(policy: str, overlap: bool) -> None:
    traffic = Traffic(
        requests=40,
        rate=30.0,
        input_len="uniform:10:150",
        output_len="uniform:100:200",
        max_tokens=200,
        prefixes=4,
        prefix_len=40,
        turns=2,
        think=1.0,
    )
    arrivals = list(synthetic(traffic))
    settings = replace(
        SETTINGS,
        num_pages=60,
        max_running_requests=32,
        schedule_policy=policy,
        schedule_conservativeness=0.0,
    )
    record = simulate(settings, CostModel(0.01, 1e-4, 1e-6), arrivals, overlap=overlap)
    fits = np.array([arrival.prompt_len + 200 <= 60 * 16 for arrival in arrivals])
    expected = np.array([arrival.output_len for arrival in arrivals])
    assert not (record.state == OPEN).any()
    assert ((record.state == DONE) == fits).all()
    assert (record.output_len[fits] == expected[fits]).all()
    assert record.retractions.sum() > 0
    assert record.machine.evicted_tokens > 0
    assert (record.first_s[fits] > record.sent_s[fits]).all()


@pytest.mark.parametrize(
    ("max_step_s", "mixed"),
    [
        (0.02, True),
        (0.05, False),
        pytest.param(0.02, False, marks=pytest.mark.slow),
        pytest.param(0.05, True, marks=pytest.mark.slow),
    ],
)
def test_long_prompts_that_time_cuts_leave_the_books_in_order(
    max_step_s: float, mixed: bool
) -> None:
    traffic = Traffic(
        requests=60, rate=6.0, input_len="lognormal:2048:1.0", output_len="lognormal:200"
    )
    settings = replace(
        SETTINGS,
        num_pages=8_000,
        context_length=65_536,
        chunked_prefill_size=8_192,
        max_running_requests=64,
        max_step_ms=max_step_s * 1_000,
        mixed_chunk=mixed,
    )
    record = simulate(settings, PRESETS["gpu"], synthetic(traffic))
    assert (record.state == DONE).all()


def test_a_simulation_repeats_itself() -> None:
    traffic = Traffic(requests=60, rate=20.0, prefixes=5, turns=2, output_len="20")
    settings = replace(SETTINGS, num_pages=2_000, context_length=16_384)
    first, again = (
        simulate(settings, CostModel(0.01, 1e-4, 1e-6), synthetic(traffic)) for _ in range(2)
    )
    assert (first.end_s == again.end_s).all()
    assert first.machine.meter.num_steps == again.machine.meter.num_steps


def test_drafts_save_steps_and_each_of_their_tokens_costs() -> None:
    """A token takes a tenth of a step, besides it; every output is the filler, so every guess is
    right."""
    cost = CostModel(1.0, 0.1)
    guessing = replace(SETTINGS, speculative="ngram")
    arrivals = [one(0.0, 100)]
    plain = simulate(SETTINGS, cost, arrivals, overlap=False)
    drafted = simulate(guessing, cost, arrivals, overlap=False)
    assert drafted.output_len[0] == plain.output_len[0] == 100
    steps = drafted.machine.meter.num_steps
    assert steps < plain.machine.meter.num_steps * 2 / 3
    # The last draft goes beyond the end, which nobody knows; all others are kept.
    num_tokens = round((drafted.machine.meter.busy_s - steps) / 0.1)
    assert 119 <= num_tokens <= 119 + 8


def test_adapters_share_the_slots_of_a_step() -> None:
    settings = replace(SETTINGS, max_loras_per_batch=1, max_loaded_loras=1)
    adapters = ["a", "b", "a", ""]
    arrivals = [one(0.0, 4)._replace(adapter=adapter) for adapter in adapters]
    record = simulate(settings, STEP, arrivals, overlap=False)
    assert record.state.tolist() == [DONE] * 4
    assert record.end_s.tolist() == [4.0, 8.0, 4.0, 12.0]
    assert record.cached_len.tolist() == [0, 0, 0, 0]
