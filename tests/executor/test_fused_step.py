from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.driver import (
    CONTEXT,
    Driver,
    ReadyBitmask,
    Turn,
    asking,
    ints,
    make_driver,
)
from weft.plan.logits import GrammarMask, LogitOp
from weft.plan.step import LAST_SAMPLED, Plan, Result

TEXT = [number % 60 + 1 for number in range(100)]  # more tokens than the first program has room for


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """One that runs whole steps, and one that computes the same step by step."""
    both = [make_driver(kernels="auto") for _ in range(2)]
    both[1].runner._run = both[1].steps.compute
    yield both
    for driver in both:
        driver.runner.close()


def plain(driver: Driver, *turns: Turn, ops: Sequence[LogitOp] = (), **changes: Any) -> Plan:
    """A plan without log probabilities; greedy, but for the changes."""
    return asking(driver.plan(*turns), *ops, **changes)


def launched(driver: Driver, *turns: Turn, **changes: Any) -> Result:
    return driver.runner.launch(plain(driver, *turns, **changes)).result()


def tables(driver: Driver) -> tuple[list[int], list[int]]:
    rows = driver.steps._rows
    return rows.slots.flatten().tolist(), rows.last_tokens.tolist()


def everything(driver: Driver) -> list[list[int]]:
    """Tokens of steps of every kind."""
    half = np.full(2, 0.5, np.float32)
    draws = np.array([0.0, 1.5], np.float32)
    results = [
        launched(driver, Turn(0, TEXT[:7], samples=False), Turn(1, TEXT[:9]), Turn(2, [5])),
        launched(
            driver,
            Turn(1, [LAST_SAMPLED]),
            Turn(0, TEXT[7:]),
            Turn(2, [LAST_SAMPLED], samples=False),
        ),
    ]
    driver.share(0, 4, 30)
    odd = GrammarMask(ints([1]), ReadyBitmask(ints([[0x2AAAAAAA, 0x0AAAAAAA]])))
    none = GrammarMask(
        ints([1, 0]), ReadyBitmask(ints([[-1, -1], [0, 0]]), {1: "nothing may follow"})
    )
    results += [
        launched(driver, Turn(4, TEXT[30:33]), Turn(1, [LAST_SAMPLED])),
        launched(
            driver, *(Turn(row, [LAST_SAMPLED]) for row in (4, 1)), temperature=draws, top_p=half
        ),
        launched(
            driver,
            *(Turn(row, [LAST_SAMPLED]) for row in (0, 4)),
            temperature=draws + 1,
            top_k=ints([3, 0]),
        ),
        launched(driver, *(Turn(row, [LAST_SAMPLED]) for row in (0, 4)), ops=[odd]),
        launched(
            driver, *(Turn(row, [LAST_SAMPLED]) for row in (0, 4)), ops=[odd], temperature=draws + 1
        ),
        launched(driver, *(Turn(row, [5]) for row in (0, 4)), ops=[none]),
        driver.launch(
            Turn(4, [LAST_SAMPLED]), Turn(2, [9, 8])
        ).result(),  # with log probabilities: not whole
        launched(driver, Turn(3, TEXT[:4], samples=False)),
        launched(driver, *(Turn(row, [LAST_SAMPLED]) for row in (4, 0, 2))),
    ]
    assert results[5].tokens[1] % 2 == 1
    assert results[6].tokens[1] % 2 == 1
    assert results[7].invalid.tolist() == [True, False]
    assert results[7].faults == ((0, "nothing may follow"),)
    return [result.tokens.tolist() for result in results]


def test_fused_steps_give_what_those_in_parts_do(drivers):
    whole, in_parts = map(everything, drivers)
    assert whole == in_parts
    assert [len(tokens) for tokens in whole] == [2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 3]
    assert tables(drivers[0]) == tables(drivers[1])


def test_what_changes_or_tells_the_models_output_is_not_fused(drivers):
    driver = drivers[0]
    takes = driver.runner.steps.takes
    assert takes(plain(driver, Turn(0, [1])))
    assert not takes(driver.plan(Turn(0, [1])))  # log probabilities


def test_a_request_that_is_not_finite_is_invalid_alone_in_a_fused_step(drivers):
    driver = drivers[0]
    launched(driver, *(Turn(row, TEXT[:9]) for row in range(3)))
    driver.steps._attention._pool.k[0][driver.slots[1]] = torch.nan
    for _ in range(2):
        result = launched(driver, *(Turn(row, [LAST_SAMPLED]) for row in range(3)))
        assert result.invalid is not None
        assert result.invalid.tolist() == [False, True, False]
        assert result.tokens[0] == result.tokens[2]
        assert result.tokens[1] == 0
    assert launched(driver, Turn(0, [LAST_SAMPLED])).invalid is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ints([8])},
        {"starts": ints([CONTEXT - 1])},
        {"lens": ints([3])},
        {"samples": np.array([False])},
    ],
)
def test_a_plan_that_does_not_hold_together_changes_nothing(drivers, wrong):
    driver = drivers[0]
    launched(driver, Turn(0, TEXT[:5]))
    before = tables(driver)
    with pytest.raises(AssertionError, match="contradicts itself"):
        driver.runner.launch(replace(plain(driver, Turn(0, [1, 2])), **wrong)).result()
    assert tables(driver) == before
