from __future__ import annotations

from typing import Any

import pytest

from benchmarks.batching import (
    CONTINUOUS,
    MIXES,
    STATIC,
    BatchingComparison,
    BatchingOptions,
    BatchingRun,
    BatchingWorkload,
    compare,
    workloads,
)
from benchmarks.static_batches import StaticBatches
from weft.bench import offline
from weft.engine.engine import Engine
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.run import Clock, Record, simulate
from weft.sim.synthetic import at_once
from weft.sim.trace import EOS, VOCAB_SIZE, Arrival

WORKLOAD = BatchingWorkload("mixed", 4, ((1, 10), (1, 30)), 3.0)
RUN = BatchingRun(
    output_per_s=100.0,
    row_use=0.5,
    rows_per_step=2.0,
    decode_step_s=0.01,
    decode_share=0.9,
    ttft_p50_s=0.1,
    e2e_p50_s=1.0,
    e2e_p99_s=2.0,
)
STEP = CostModel(0.01, 0.0, 0.0)  # seconds: a step, whatever is in it


def batched(arrivals: list[Arrival], num_rows: int = 2) -> tuple[Record, StaticBatches]:
    """What becomes of requests that a static front of two rows serves, in virtual time."""
    made: list[StaticBatches] = []

    def collect(engine: Engine, clock: Clock) -> StaticBatches:
        made.append(StaticBatches(engine, num_rows=num_rows, num_requests=len(arrivals)))
        return made[-1]

    settings = SchedulerSettings(
        num_pages=1_000,
        page_size=4,
        max_running_requests=num_rows,
        context_length=400,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        aging_s=0.0,
    )
    return simulate(settings, STEP, arrivals, overlap=False, around=collect), made[0]


def test_a_row_that_is_done_is_computed_until_the_slowest_of_its_batch_ends() -> None:
    record, front = batched(at_once([(4, 5), (4, 20), (4, 3), (4, 6)]))
    assert record.output_len.tolist() == [5, 20, 3, 6]
    assert front.num_padding == 15 + 3
    assert record.machine.meter.num_decode_rows == 2 * 19 + 2 * 5
    # Each has its last token when it is computed, and the next batch begins behind the slowest.
    assert record.end_s[0] - record.first_s[0] == pytest.approx(4 * 0.01)
    assert record.first_s[2] > record.end_s[1]


def test_a_static_batch_begins_when_it_is_full_or_nobody_else_comes() -> None:
    arrivals = at_once([(4, 2), (4, 2), (4, 2)])
    times = (0.0, 1.0, 3.0)
    arrivals = [each._replace(time_s=time_s) for each, time_s in zip(arrivals, times, strict=True)]
    record, front = batched(arrivals)
    assert record.first_s.tolist() == pytest.approx([1.01, 1.01, 3.01])
    assert front.num_padding == 0


def test_a_request_that_is_refused_ends_in_a_static_batch_too() -> None:
    record, _ = batched(at_once([(4, 2), (500, 2), (4, 3)]))
    assert record.output_len.tolist() == [2, 0, 3]


@pytest.mark.parametrize("mix", MIXES)
def test_workloads_have_lengths_from_100_to_1000(mix: str) -> None:
    uniform, mixed, high = workloads(mix)
    assert len({output for _, output in uniform.lengths}) == 1
    for workload in (mixed, high):
        outputs = [output for _, output in workload.lengths]
        assert 100 <= min(outputs) < 200
        assert 900 < max(outputs) <= 1_000
        assert len(outputs) > 8 * workload.num_rows
    assert high.num_rows > mixed.num_rows


def test_workloads_can_be_made_shorter() -> None:
    assert max(output for workload in workloads(scale=0.1) for _, output in workload.lengths) <= 100


def test_each_workload_runs_both_ways_in_turns_at_the_load_asked_for() -> None:
    calls = []

    def play(workload: BatchingWorkload, arrivals: list[Arrival], way: str) -> Record:
        calls.append((way, len(arrivals), arrivals[-1].time_s > 0))
        settings = SchedulerSettings(
            num_pages=1_000,
            page_size=4,
            max_running_requests=4,
            context_length=400,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            aging_s=0.0,
        )
        return simulate(settings, STEP, arrivals)

    comparison = compare(WORKLOAD, play, BatchingOptions(repeats=2))
    peak = (CONTINUOUS, 4, False)
    turn = [(STATIC, 2, True), (CONTINUOUS, 2, True)]
    assert calls == [peak, peak, *turn, *turn]
    assert comparison.peak_per_s == pytest.approx(4 / 0.01)
    assert comparison.ratio == 1.0


@pytest.mark.parametrize(
    ("goal", "changed", "reason"),
    [
        (1.5, {"output_per_s": 200.0}, "2.00 x the rows"),
        (3.0, {"output_per_s": 200.0}, "too few rows idle"),
        (1.4, {"output_per_s": 110.0, "decode_step_s": 0.018}, "take too much longer"),
    ],
)
def test_report_says_where_the_ratio_comes_from(
    goal: float, changed: dict[str, Any], reason: str
) -> None:
    continuous = RUN._replace(rows_per_step=4.0, **changed)
    comparison = BatchingComparison(WORKLOAD._replace(goal=goal), 400.0, RUN, continuous)
    assert reason in comparison.why
    assert comparison.is_met == (goal == 1.5)


def test_speed_is_the_median_of_the_runs_after_the_first() -> None:
    load = offline.StreamLoad(num_streams=2, input_len=10, output_len=30)
    totals = iter([100.0, 1.0, 2.0, 4.0])
    (speed,) = offline.measure(
        [load], lambda load: offline.StreamTimes(next(totals), 0.1, 0.2), repeats=3
    )
    assert speed.output_per_s == 30.0
    assert speed.slowest_per_s == 15.0
    assert speed.fastest_per_s == 60.0
    assert speed.total_per_s == 40.0
    assert speed.ttft_s == 0.1
    assert speed.itl_s == 0.2
