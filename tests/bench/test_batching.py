from __future__ import annotations

from typing import Any

import pytest

from weft.bench import offline
from weft.bench.batching import (
    CONTINUOUS,
    MIXES,
    STATIC,
    BatchingComparison,
    BatchingRun,
    BatchingWorkload,
    compare,
    workloads,
)

WORKLOAD = BatchingWorkload("mixed", 4, ((1, 100), (1, 300)), 3.0)
RUN = BatchingRun(
    output_per_s=100.0, row_use=0.5, rows_per_step=2.0, decode_step_s=0.01, decode_share=0.9
)


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


def test_each_workload_runs_under_both_policies() -> None:
    calls = []

    def run(workload: BatchingWorkload, policy: str) -> BatchingRun:
        calls.append((workload.name, policy))
        return RUN

    compare([WORKLOAD], run)
    assert calls == [("mixed", STATIC), ("mixed", CONTINUOUS)]


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
    comparison = BatchingComparison(WORKLOAD._replace(goal=goal), RUN, continuous)
    assert reason in comparison.why
    assert comparison.is_met == (goal == 1.5)


def test_speed_is_the_median_of_the_runs_after_the_first() -> None:
    load = offline.StreamLoad(num_streams=2, input_len=10, output_len=30)
    totals = iter([100.0, 1.0, 2.0, 4.0])
    (speed,) = offline.measure(
        [load], lambda load: offline.StreamTimes(next(totals), 0.1, 0.2), repeats=3
    )
    assert (speed.output_per_s, speed.slowest_per_s, speed.fastest_per_s) == (30.0, 15.0, 60.0)
    assert speed.total_per_s == 40.0
    assert (speed.ttft_s, speed.itl_s) == (0.1, 0.2)
