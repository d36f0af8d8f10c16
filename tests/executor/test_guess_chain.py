"""The passes of a draft model in one call of the kernels: they draw what a step for each pass
draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.executor.driver import CONTEXT, Driver, Turn, asking, ints, make_driver, sampling
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.heads.guessing import GuessPasses
from weft.plan.step import Drafting, ForwardMode, Plan

TEXT = [number % 60 + 1 for number in range(100)]


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """One that guesses in one call, and one for which each pass is a step."""
    both = [make_driver(kernels="auto") for _ in range(2)]
    yield both
    for driver in both:
        driver.runner.close()


def drafting_plan(driver: Driver, counts: list[int], *turns: Turn, **columns: Any) -> Plan:
    """A plan that guesses `counts` tokens behind what each turn runs."""
    plan = driver.plan(*turns)
    ends = (plan.starts + plan.lens).tolist()
    positions = [end + i for end, count in zip(ends, counts, strict=True) for i in range(count)]
    slots = ints(driver.free.pop() for count in counts for _ in range(count - 1))
    return replace(
        asking(plan),
        mode=ForwardMode.DRAFT,
        samples=ints(counts) > 0,
        sampling=sampling(positions, **columns),
        drafting=Drafting(ints(counts), slots),
    )


def guessed(driver: Driver, plan: Plan, *, at_once: bool) -> list[int]:
    steps = driver.runner.steps
    assert isinstance(steps, CpuFusedSteps)
    assert plan.drafting is not None
    source = steps if at_once else GuessPasses(steps.compute)
    return [int(token) for token in source.guess(plan, plan.drafting)]


def everything(driver: Driver, *, at_once: bool) -> list[list[int]]:
    """The guesses of steps of every kind, each behind what is left of the ones before."""
    drawn = []

    def guess(counts: list[int], *turns: Turn, **columns: Any) -> None:
        plan = drafting_plan(driver, counts, *turns, **columns)
        drawn.append(guessed(driver, plan, at_once=at_once))

    guess([3], Turn(0, TEXT[:7]))
    guess([1], Turn(0, TEXT[7:9]))
    guess([4], Turn(0, TEXT[9:10]), temperature=np.full(4, 1.3, np.float32))
    guess([0, 2], Turn(1, TEXT[:80], samples=False), Turn(0, TEXT[10:11]))
    guess([2, 5, 0, 1], *(Turn(row, TEXT[row : row + 3]) for row in (3, 1, 2, 0)))
    guess(
        [3, 1, 5],
        *(Turn(row, TEXT[row : row + 1]) for row in (2, 0, 1)),
        temperature=np.array([1.5, 0, 0.7, 1, 1, 0, 0.2, 0.9, 2], np.float32),
        top_k=ints([3, 0, 0, 7, 0, 0, 0, 5, 0]),
        top_p=np.linspace(0.3, 1, 9, dtype=np.float32),
        min_p=np.linspace(0.2, 0, 9, dtype=np.float32),
        seeds=np.arange(100, 109, dtype=np.int64),
    )
    driver.share(0, 5, 8)
    guess([8] * 4, *(Turn(row, [row + 1]) for row in (5, 0, 1, 3)))
    guess([0], Turn(4, TEXT[:3], samples=False))
    return drawn


def test_one_call_draws_what_a_step_for_each_pass_draws(drivers: list[Driver]) -> None:
    at_once, in_steps = drivers
    drawn = everything(at_once, at_once=True)
    assert drawn == everything(in_steps, at_once=False)
    assert [len(tokens) for tokens in drawn] == [3, 1, 4, 2, 8, 9, 32, 0]
    tables = [driver.steps._rows for driver in drivers]
    assert tables[0].slots.tolist() == tables[1].slots.tolist()
    assert tables[0].last_tokens.tolist() == tables[1].last_tokens.tolist()


def test_each_pass_is_a_profiled_step(drivers: list[Driver]) -> None:
    from weft.ops.cpp.timing import Timings

    driver = drivers[0]
    guessed(driver, drafting_plan(driver, [2], Turn(0, TEXT[:5])), at_once=True)
    library = driver.runner.kernels
    assert library is not None
    library.timings = Timings()
    try:
        guessed(driver, drafting_plan(driver, [3], Turn(0, TEXT[5:6])), at_once=True)
        names = [span.name for span in library.timings.spans()]
    finally:
        library.timings = None
    assert names.count("weft::argmax") == 3


def test_a_chain_that_leaves_its_table_is_refused(drivers: list[Driver]) -> None:
    driver = drivers[0]
    guessed(driver, drafting_plan(driver, [1], Turn(0, TEXT)), at_once=True)
    length = CONTEXT - len(TEXT)
    plan = drafting_plan(driver, [3], Turn(0, TEXT[:length]))
    with pytest.raises(AssertionError, match="leaves its tables"):
        guessed(driver, plan, at_once=True)
