from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import ints, sampling
from weft.executor.inputs import DeviceRowTable
from weft.plan.step import LAST_SAMPLED, ForwardMode, Plan, TableWrites

CPU = torch.device("cpu")

# Row 4 continues at 2 with three tokens, row 0 decodes at 5, row 2 begins with two and does not
# sample.
PLAN = Plan(
    step=1,
    mode=ForwardMode.MIXED,
    rows=ints([4, 0, 2]),
    starts=ints([2, 5, 0]),
    lens=ints([3, 1, 2]),
    tokens=ints([11, 12, 13, LAST_SAMPLED, 14, 15]),
    slots=ints([50, 51, 52, 60, 70, 71]),
    samples=np.array([True, True, False]),
    sampling=sampling([5, 6]),
)


def test_tokens_are_laid_out_with_their_positions():
    table = DeviceRowTable(6, 10, CPU)
    table.last_tokens[0] = 99
    inputs = table.apply(PLAN)
    assert inputs.tokens.tolist() == [11, 12, 13, 99, 14, 15]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 0, 1]
    assert inputs.batch.slots.tolist() == [50, 51, 52, 60, 70, 71]
    assert inputs.last.tolist() == [2, 3]
    assert inputs.last_tokens.tolist() == [13, 99]
    assert inputs.sampling_rows.tolist() == [4, 0]


def test_new_slots_go_into_the_table_and_nothing_else_changes():
    table = DeviceRowTable(6, 10, CPU)
    table.slots.fill_(-7)
    table.apply(PLAN)
    expected = torch.full((6, 10), -7, dtype=torch.int32)
    expected[4, 2:5] = torch.tensor([50, 51, 52])
    expected[0, 5] = 60
    expected[2, :2] = torch.tensor([70, 71])
    assert torch.equal(table.slots, expected)


def test_table_writes_come_before_the_plan_and_in_order():
    table = DeviceRowTable(6, 10, CPU)
    writes = TableWrites(
        rows=ints([4, 1, 4]),
        starts=ints([0, 3, 1]),
        lens=ints([4, 2, 1]),
        slots=ints([1, 2, 3, 4, 5, 6, 7]),
    )
    table.apply(replace(PLAN, table=writes))
    assert table.slots[4, :5].tolist() == [1, 7, 50, 51, 52]
    assert table.slots[1].tolist() == [0, 0, 0, 5, 6, 0, 0, 0, 0, 0]


def test_table_writes_may_be_empty():
    table = DeviceRowTable(6, 10, CPU)
    table.apply(
        replace(PLAN, table=TableWrites(ints([1, 3]), ints([4, 5]), ints([0, 2]), ints([8, 9])))
    )
    assert table.slots[3, 5:7].tolist() == [8, 9]
    assert not table.slots[1].any()


def test_plan_may_consist_of_table_writes_alone():
    table = DeviceRowTable(6, 10, CPU)
    nothing = ints([])
    plan = Plan(
        step=1,
        mode=ForwardMode.EXTEND,
        rows=nothing,
        starts=nothing,
        lens=nothing,
        tokens=nothing,
        slots=nothing,
        samples=np.zeros(0, dtype=np.bool_),
        sampling=sampling([]),
        table=TableWrites(ints([5]), ints([8]), ints([2]), ints([3, 4])),
    )
    assert len(table.apply(plan).tokens) == 0
    assert table.slots[5, 8:].tolist() == [3, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ints([6, 0, 2])},
        {"starts": ints([8, 5, 0])},
        {"lens": ints([3, 2, 2])},
        {"lens": ints([4, 0, 2])},
        {"slots": ints([1])},
    ],
)
def test_a_plan_that_contradicts_itself_or_the_table_is_refused(wrong):
    with pytest.raises(AssertionError):
        DeviceRowTable(6, 10, CPU).apply(replace(PLAN, **wrong))
