from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.sim.fit import StepTime, fit, read_steps, write_steps

TRUE = CostModel(0.005, 5e-5, 2e-7, 1e-4)


def measured(noise: float) -> list[StepTime]:
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(3_000):
        rows = int(rng.integers(1, 64))
        tokens = rows if rng.random() < 0.7 else int(rng.integers(64, 2_048))
        context = tokens + int(rng.integers(0, rows * 500))
        seconds = TRUE.seconds(StepLoad(tokens, 0, context, rows))
        steps.append(StepTime(tokens, context, rows, seconds * rng.gamma(1 / noise, noise)))
    return steps


def test_fit_finds_the_cost_that_made_the_steps() -> None:
    assert fit(measured(1e-9)).cost == pytest.approx(TRUE, rel=0.01)


def test_fit_agrees_with_noisy_steps_in_sum() -> None:
    found = fit(measured(0.2))
    assert abs(found.total_error) < 1e-3
    assert found.cost.step_s == pytest.approx(TRUE.step_s, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    steps = [StepTime(tokens, 10, 1, 1 / tokens) for tokens in range(1, 100)]
    assert min(fit(steps).cost) >= 0


def test_one_step_is_enough_and_none_is_not() -> None:
    assert fit([StepTime(1, 1, 1, 0.5)]).total_error == pytest.approx(0)
    with pytest.raises(ValueError, match="no steps"):
        fit([])


def test_steps_survive_a_file(tmp_path: Path) -> None:
    name = str(tmp_path / "steps.csv")
    steps = [StepTime(1, 2, 3, 0.25), StepTime(4, 5, 6, 1.5)]
    write_steps(name, steps)
    assert read_steps(name) == steps


def test_other_file_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="num_tokens"):
        read_steps(str(path))
