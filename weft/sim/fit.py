"""The cost model from measured steps: least squares with coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.sim.cost import Cost
from weft.sim.measured import StepTime

DoubleArray: TypeAlias = NDArray[np.float64]

ROUNDS = 8


class Fit(NamedTuple):
    cost: Cost
    num_steps: int
    total_error: float  # of the sum of all seconds: model / measured - 1
    median_error: float  # of single steps, without sign


def fit(steps: Sequence[StepTime]) -> Fit:
    """Fit a, b, c, d to measured steps. Raises ValueError if there are none.

    A step weighs 1 / the seconds that the model gives it (found in rounds): so the many short steps count as much as
    the few long ones, and model and measurement agree in sum, as they would not with 1 / the measured seconds.
    """
    if not steps:
        raise ValueError("there are no steps to fit the cost model to")
    table = np.array(steps, dtype=np.float64)  # [N, 4]: tokens, context, samples, seconds
    seconds = table[:, 3]
    loads = np.column_stack([np.ones(len(steps)), table[:, :3]])  # [N, 4]
    model = np.full(len(steps), seconds.mean())
    for _ in range(ROUNDS):
        weights = 1 / np.sqrt(np.maximum(model, 1e-9))
        solution = _least_squares(loads * weights[:, None], seconds * weights)
        model = loads @ solution
    return Fit(
        cost=Cost(*solution.tolist()),
        num_steps=len(steps),
        total_error=float(model.sum() / seconds.sum() - 1),
        median_error=float(np.median(np.abs(model / seconds - 1))),
    )


def _least_squares(matrix: DoubleArray, target: DoubleArray) -> DoubleArray:
    """The x >= 0 [4] that brings matrix [N, 4] @ x nearest to target [N].

    With four unknowns each subset of them can be tried: the best one whose solution is positive is the answer.
    """
    best, best_residual = np.zeros(4), np.inf
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    scaled = matrix / scale
    for size in range(1, 5):
        for chosen in map(list, combinations(range(4), size)):
            solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            residual = float(np.sum((scaled[:, chosen] @ solution - target) ** 2))
            if (solution >= 0).all() and residual < best_residual * (1 - 1e-9):
                best, best_residual = np.zeros(4), residual
                best[chosen] = solution / scale[chosen]
    return best
