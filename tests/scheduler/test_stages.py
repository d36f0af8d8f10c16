"""Running requests that take turns where several stages work at once."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from tests.scheduler.random_worlds import run_random
from weft.arrays import IntArray
from weft.scheduler.request import Columns
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.stages.turns import StageTurns


def columns(num_rows: int = 6, **settings: int) -> Columns:
    """Rows that decode, of which all tokens are known, and which end at 90."""
    of_all = SchedulerSettings(
        num_pages=1,
        page_size=1,
        context_length=100,
        vocab_size=9,
        max_running_requests=num_rows,
        **settings,
    )
    found = Columns(num_rows, of_all.context_length)
    found.turns.append(StageTurns(num_rows, of_all))
    found.max_len[:] = 90
    found.seq_len[:] = 5
    found.known_len[:] = 5
    return found


def steps_of(found: Columns, num_steps: int, depth: int) -> list[list[int]]:
    """The rows of each step, with `depth` steps in flight behind each."""
    rows = np.arange(len(found.seq_len), dtype=np.int32)
    in_flight: deque[IntArray] = deque()
    steps = []
    while len(steps) < num_steps:
        turn = found.unfinished(rows)
        if len(turn):
            found.seq_len[turn] += 1
            in_flight.append(turn)
            steps.append(turn.tolist())
        if len(in_flight) > depth or not len(turn):
            found.known_len[in_flight.popleft()] += 1
    return steps


def test_two_stages_have_different_rows_at_any_time() -> None:
    steps = steps_of(columns(num_stages=2), 6, depth=1)
    assert steps == [[0, 1, 2], [3, 4, 5]] * 3


def test_all_rows_have_their_turn_where_only_one_step_runs_at_a_time() -> None:
    """As behind steps with grammars, whose results must be known first."""
    steps = steps_of(columns(num_stages=3, max_stage_rows=1), 12, depth=0)
    assert sorted(row for step in steps for row in step) == sorted([*range(6)] * 2)


def test_a_bound_on_rows_of_a_step_holds() -> None:
    steps = steps_of(columns(num_stages=2, max_stage_rows=2), 9, depth=1)
    assert all(len(step) == 2 for step in steps)
    assert sorted(row for step in steps for row in step) == sorted([*range(6)] * 3)


def test_where_memory_is_short_all_rows_are_looked_at() -> None:
    found = columns(num_stages=2)
    rows = np.arange(6, dtype=np.int32)
    found.seq_len[4] = 90
    assert found.all_unfinished(rows).tolist() == [0, 1, 2, 3, 5]
    plain = Columns(6, 100)
    plain.max_len[:] = 90
    assert plain.all_unfinished(rows).tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("seed", "num_stages"), [(1004, 3), pytest.param(1001, 2, marks=pytest.mark.slow)]
)
def test_random_requests_end_well_and_replay_whatever_stages_work_on(
    seed: int, num_stages: int
) -> None:
    run_random(seed, 8, num_stages=num_stages, puts_aside=True).replay(check=True)
