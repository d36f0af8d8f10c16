"""The cost of a step as a curve: what made the times is found again, also where nothing was
measured."""

from __future__ import annotations

import numpy as np
import pytest

from weft.scheduler.pace.step_cost import StepLoad
from weft.sim.curve import StepCurve, fit_curve, not_negative
from weft.sim.fit import StepTime

TRUE = StepCurve(
    step_s=0.01,
    knots=(1, 8, 64, 256),
    token_s=(2e-4, 2e-3, 5e-4, 4e-4),
    context_s=1e-6,
    sample_s=3e-4,
)


def steps(cost: StepCurve, noise: float = 0.0) -> list[StepTime]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(30):
        for tokens in (1, 2, 3, 6, 12, 30, 60, 100, 200, 300, 400):
            samples = min(tokens, 12)
            context = int(rng.integers(tokens, 4_000))
            seconds = cost.seconds(StepLoad(tokens, 0, context, samples))
            factor = rng.lognormal(0.0, noise)
            found.append(StepTime(tokens, context, samples, seconds * factor))
    return found


def test_the_curve_that_made_the_times_is_found_between_the_measured_sizes() -> None:
    found = fit_curve(steps(TRUE)).curve
    for tokens in (1, 4, 9, 20, 45, 80, 150, 250, 350):
        load = StepLoad(tokens, 0, 1_000, min(tokens, 12))
        assert found.seconds(load) == pytest.approx(TRUE.seconds(load), rel=0.06)


def test_a_straight_line_does_not_fit_where_a_curve_does() -> None:
    measured = steps(TRUE, noise=0.05)
    fitted = fit_curve(measured)
    assert fitted.median_error < 0.05
    assert fitted.total_error == pytest.approx(0, abs=0.01)


def test_a_few_disturbed_steps_change_little() -> None:
    measured = steps(TRUE)
    for index in range(0, len(measured), 50):
        measured[index] = measured[index]._replace(seconds=1.0)
    load = StepLoad(100, 0, 1_000, 12)
    assert fit_curve(measured).curve.seconds(load) == pytest.approx(TRUE.seconds(load), rel=0.2)


def test_steps_of_one_size_give_a_cost_of_any_size() -> None:
    found = fit_curve([StepTime(4, 40, 4, 0.02)] * 5)
    assert found.curve.seconds(StepLoad(4, 0, 40, 4)) == pytest.approx(0.02)
    assert found.curve.seconds(StepLoad(400, 0, 4_000, 4)) >= 0.02


def test_without_steps_there_is_no_curve() -> None:
    with pytest.raises(ValueError, match="no steps"):
        fit_curve([])


def test_parts_add_up_to_the_step_and_scale_with_the_machine() -> None:
    load = StepLoad(300, 5_000, 900, 7)
    parts = TRUE.parts(load)
    total = parts.weights_s + parts.compute_s + parts.context_s + parts.sample_s
    assert total == TRUE.seconds(load)
    assert TRUE.times(2.0).seconds(load) == pytest.approx(2 * total)


def test_the_best_terms_that_are_not_negative_are_those_of_all_subsets() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        loads = rng.normal(size=(20, 4))
        target = rng.normal(size=20)
        matrix = loads.T @ loads
        vector = loads.T @ target
        found = not_negative(matrix, vector)
        assert (found >= 0).all()
        best = min(_value(matrix, vector, chosen) for chosen in range(16))
        assert found @ matrix @ found / 2 - vector @ found == pytest.approx(best, abs=1e-9)


def _value(matrix, vector, chosen: int) -> float:
    """The lowest value with these terms alone, infinite if one of them is negative."""
    free = [index for index in range(4) if chosen >> index & 1]
    x = np.zeros(4)
    if free:
        x[free] = np.linalg.solve(matrix[np.ix_(free, free)], vector[free])
    if (x < 0).any():
        return np.inf
    return float(x @ matrix @ x / 2 - vector @ x)
