"""An answer does not depend on the adapters of its neighbours: on the CPU kernels, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import Driver, Turn, asking, ints
from tests.executor.lora.adapters import (
    ALL,
    ENDS,
    QV,
    Base,
    load,
    logprobs_with,
    make_adapter,
    run_with,
)
from weft.plan.device import UnloadAdapter
from weft.plan.step import LAST_SAMPLED

NUM = 6
TEXTS = [[(11 * row + 5 * number) % 120 + 5 for number in range(40)] for row in range(NUM + 1)]
# Of row r: what it runs in each step. Some have long chunks while others decode.
CUTS = [(17, 18, 19, 40), (3, 15, 30, 31), (30, 31, 32, 33), (1, 2, 3, 4), (12, 24, 25, 38)]


def loaded(base: Base, driver: Driver, folder: Path) -> list[int]:
    """Adapters of all kinds in places 0 to 5. Returns the adapter of each row: row 6 has none."""
    kinds = [(ALL, 8), (QV, 4), (ALL, 64), (ALL, 20), (("mlp.down_proj",), 8), (ALL, 16)]
    for place, (endings, rank) in enumerate(kinds):
        name = folder / f"{place}-{rank}"
        ends = ENDS if place == 3 else ()
        modules = [*base.modules(endings), *ends]
        made = make_adapter(base, name, modules, rank=rank, seed=place)
        assert load(driver, base, place, made.folder).ok
    return [*range(NUM), -1]


def turns_of(row: int, adapter_row: int) -> list[Turn]:
    cuts = CUTS[row % len(CUTS)]
    begins = (0, *cuts)
    return [
        Turn(adapter_row, TEXTS[row][begin:end]) for begin, end in zip(begins, cuts, strict=False)
    ]


@pytest.mark.parametrize("quantize", ["", "int8", "int4", "bfloat16"])
def test_base_and_six_adapters_in_one_batch_give_what_each_gives_alone(
    base, drive, tmp_path: Path, quantize: str
) -> None:
    settings = {"dtype": "bfloat16"} if quantize == "bfloat16" else {"quantize": quantize}
    driver = drive(base, num_adapter_slots=NUM, kernels="auto", threads=2, **settings)
    adapters = loaded(base, driver, tmp_path)
    together: list[list[Tensor]] = [[] for _ in adapters]
    for step in range(4):
        # The order of the rows changes, so that neighbours do.
        order = [(row + 2 * step) % len(adapters) for row in range(len(adapters))]
        turns = [turns_of(row, row)[step] for row in order]
        found = logprobs_with(driver, [adapters[row] for row in order], *turns)
        for index, row in enumerate(order):
            together[row].append(found[index])
    for row, adapter in enumerate(adapters):
        del driver.slots[row]
        driver.free = list(np.random.default_rng(row).permutation(640))
        for step, turn in enumerate(turns_of(row, row)):
            if adapter < 0:
                alone = driver.run(turn)[0]
            else:
                alone = logprobs_with(driver, [adapter], turn)[0]
            assert torch.equal(alone, together[row][step]), (row, step)
    for row in range(NUM):
        for other in range(row):
            assert not torch.equal(together[row][-1], together[other][-1])


def test_fused_steps_have_adapters_too(base, drive, tmp_path: Path) -> None:
    driver = drive(base, num_adapter_slots=NUM, kernels="auto")
    adapters = loaded(base, driver, tmp_path)
    rows = range(len(adapters))

    def step(texts: list[list[int]], places: list[int] | None) -> list[int]:
        plan = asking(driver.plan(*(Turn(row, texts[row]) for row in rows)))
        assert driver.runner.steps.takes(plan)
        chosen = None if places is None else ints(places)
        return driver.runner.launch(replace(plan, adapters=chosen)).result().tokens.tolist()

    # Log probabilities are not computed by fused steps: they tell what these should choose.
    prompts = [TEXTS[row][:9] for row in rows]
    turns = [Turn(row, prompts[row]) for row in rows]
    expected = logprobs_with(driver, adapters, *turns).argmax(1).tolist()
    driver.slots.clear()
    assert step(prompts, adapters) == expected
    sampled = [[LAST_SAMPLED]] * len(adapters)
    lens = {row: len(slots) for row, slots in driver.slots.items()}
    found = step(sampled, adapters)
    driver.slots = {row: slots[: lens[row]] for row, slots in driver.slots.items()}
    told = [Turn(row, [expected[row]]) for row in rows]
    assert found == logprobs_with(driver, adapters, *told).argmax(1).tolist()


def test_a_step_without_adapters_behind_one_with_them_is_the_base(
    base, drive, tmp_path: Path
) -> None:
    driver = drive(base, num_adapter_slots=NUM, kernels="auto")
    before = driver.run(Turn(0, TEXTS[0][:9]))
    loaded(base, driver, tmp_path)
    with_one = logprobs_with(driver, [2], Turn(1, TEXTS[0][:9]))
    after = driver.run(Turn(2, TEXTS[0][:9]))
    assert torch.equal(before, after)
    assert not torch.equal(before, with_one)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_place_that_is_loaded_anew_has_the_new_adapter_alone(
    base, drive, tmp_path: Path, kernels: str
) -> None:
    driver = drive(base, num_adapter_slots=2, kernels=kernels)
    first = make_adapter(base, tmp_path / "first", base.modules(ALL), seed=1)
    second = make_adapter(base, tmp_path / "second", base.modules(QV), seed=2)
    text = TEXTS[0][:9]
    assert load(driver, base, 0, second.folder).ok
    expected = logprobs_with(driver, [0], Turn(0, text))
    assert load(driver, base, 1, first.folder).ok
    other = logprobs_with(driver, [1], Turn(1, text))
    assert driver.runner.control(UnloadAdapter(1)).result().ok
    assert load(driver, base, 1, second.folder).ok
    assert torch.equal(logprobs_with(driver, [1], Turn(2, text)), expected)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_an_adapter_that_cannot_be_loaded_leaves_its_place_as_it_is(
    base, drive, tmp_path: Path, kernels: str
) -> None:
    driver = drive(base, kernels=kernels)
    good = make_adapter(base, tmp_path / "good", base.modules(ALL))
    assert load(driver, base, 0, good.folder).ok
    expected = logprobs_with(driver, [0], Turn(0, TEXTS[0][:9]))
    bad = make_adapter(base, tmp_path / "bad", base.modules(QV), use_dora=True)
    reply = load(driver, base, 0, bad.folder, uid="0" * 32)
    assert (reply.ok, reply.status) == (False, 400)
    assert "use_dora" in reply.message
    changed = load(driver, base, 0, good.folder, uid="0" * 32)
    assert "have changed" in changed.message
    assert torch.equal(logprobs_with(driver, [0], Turn(1, TEXTS[0][:9])), expected)


def test_a_slot_that_does_not_exist_is_an_error_of_the_planner(base, drive) -> None:
    driver = drive(base, num_adapter_slots=2)
    with pytest.raises(AssertionError, match="slot 2 of 2"):
        run_with(driver, [2], Turn(0, [5]))
