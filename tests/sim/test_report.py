from __future__ import annotations

import json

import numpy as np
import pytest

from weft.sim.changes import changes
from weft.sim.changes import describe as describe_changes
from weft.sim.outcome import DONE, REFUSED
from weft.sim.report import Slo, compare, describe, fairness, summarize
from weft.sim.run import Labels, MachineRecord, Record
from weft.sim.table import level_in, number, table


def record(
    end_s: list[float], tenant: list[int] | None = None, state: list[int] | None = None
) -> Record:
    """Requests that come at 0 and have their first token after one second, and eleven in the
    end."""
    n = len(end_s)
    return Record(
        sent_s=np.zeros(n),
        first_s=np.ones(n),
        end_s=np.array(end_s),
        prompt_len=np.full(n, 100),
        output_len=np.full(n, 11),
        cached_len=np.full(n, 25),
        retractions=np.zeros(n, dtype=np.int64),
        state=np.array(state or [DONE] * n),
        tenant=Labels(np.array(tenant or [0] * n), ["one", "two"]),
        reason=Labels(np.zeros(n, dtype=np.int64), []),
        background=np.zeros(n, dtype=np.bool_),
        machine=MachineRecord(num_rows=4),
    )


def test_figures_follow_from_the_record() -> None:
    summary = summarize(record([11.0, 21.0]), Slo())
    assert summary.duration_s == 21.0
    assert summary.requests_per_s == pytest.approx(2 / 21)
    assert summary.output_per_s == pytest.approx(22 / 21)
    assert summary.total_per_s == pytest.approx(222 / 21)
    assert summary.ttft_s == (1.0, 1.0, 1.0)
    assert summary.e2e_s[0] == 16.0
    assert summary.hit_rate == 0.25
    assert summary.good_share == 1.0


def test_a_step_beyond_the_last_token_makes_no_device_busier_than_always() -> None:
    measured = record([11.0, 21.0])
    measured.machine.meter.add(1, 10.5)
    assert summarize(measured, Slo()).device_use == 0.5
    measured.machine.meter.add(1, 11.0)
    assert summarize(measured, Slo()).device_use == 1.0


def test_refused_requests_count_as_not_good_and_nowhere_else() -> None:
    summary = summarize(record([11.0, 0.0], state=[DONE, REFUSED]), Slo())
    assert summary.requests == 2
    assert summary.refused == 1
    assert summary.good_share == 0.5
    assert summary.e2e_s == (11.0, 11.0, 11.0)


@pytest.mark.parametrize(
    ("slo", "share"), [(Slo(ttft_s=0.5), 0.0), (Slo(itl_s=1.5), 0.5), (Slo(1.0, 2.0), 1.0)]
)
def test_goodput_counts_requests_that_keep_both_limits(slo: Slo, share: float) -> None:
    assert summarize(record([11.0, 21.0]), slo).good_share == share


def test_fairness_is_one_for_equal_speeds_and_one_nth_if_one_gets_all() -> None:
    assert fairness(record([10.0, 10.0, 10.0, 10.0], tenant=[0, 0, 0, 1])) == pytest.approx(1.0)
    assert fairness(record([1e-3, 1e9], tenant=[0, 1])) == pytest.approx(0.5)


def test_run_without_a_finished_request_has_figures_too() -> None:
    summary = summarize(record([0.0], state=[REFUSED]), Slo())
    assert "1 refused" in describe(summary)
    assert json.loads(json.dumps(summary.to_dict()))["e2e_s"] == {
        "p50": None,
        "p90": None,
        "p99": None,
    }


def test_comparison_has_a_row_for_each_run() -> None:
    text = compare(["a", "b"], [summarize(record([11.0]), Slo())] * 2)
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["a", "b"]


def test_changes_count_requests_one_by_one_and_name_the_worst() -> None:
    found = changes(record([10.0, 10.0, 10.0, 10.0]), record([5.0, 10.05, 30.0, 20.0]))
    assert found.num_better == 1
    assert found.num_same == 1
    assert found.num_worse == 2
    assert found.num_lost == 0
    assert [(change.number, change.after_s) for change in found.worst] == [(2, 30.0), (3, 20.0)]
    assert "+20.0 s" in describe_changes("b", "a", found)


def test_request_that_ends_in_one_run_only_is_distinguished() -> None:
    found = changes(record([10.0, 10.0]), record([10.0, 0.0], state=[DONE, REFUSED]))
    assert found.num_lost == 1
    assert found.num_same == 1
    assert found.worst == []


def test_a_level_has_its_unit() -> None:
    assert level_in("users", 1) == "1 user"
    assert level_in("users", 1_200) == "1,200 users"
    assert level_in("x the recorded rate", 1) == "1 x the recorded rate"


def test_table_aligns_its_columns() -> None:
    assert table(["", "n"], [["one", "1"], ["eleven", "11"]]).splitlines() == [
        "         n",
        "----------",
        "one      1",
        "eleven  11",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0712345, "0.0712"),
        (3.4, "3.40"),
        (52.13, "52.1"),
        (1234.5, "1,234"),
        (0, "0"),
        (float("nan"), "-"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text
