"""The cost model from measured steps:
a file of them, and least squares with coefficients that are not negative.

Knows nothing of how steps are measured (`weft/bench/testbed.py` does that).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.scheduler.pace.step_cost import CostModel, solve_not_negative

DoubleArray: TypeAlias = NDArray[np.float64]

ROUNDS = 8
LEAST_S = 1e-9


class StepTime(NamedTuple):
    """One step: its load, and the seconds it took."""

    num_tokens: int
    context: int
    num_samples: int
    seconds: float


class CostFit(NamedTuple):
    cost: CostModel
    num_steps: int
    total_error: float  # of the sum of all seconds: model / measured - 1
    median_error: float  # of single steps, without sign

    @property
    def text(self) -> str:
        """The cost as `--cost` takes it: a,b,c,d."""
        return ",".join(f"{value:.6g}" for value in self.cost[:4])


def fit(steps: Sequence[StepTime]) -> CostFit:
    """Fit seconds of a step, a token, a token of context and a sample.
    Raises ValueError if there are no steps.

    A step weighs 1 / the seconds that the model gives it (found in rounds): so the many short steps
    count as much as the few long ones, and model and measurement agree in sum,
    as they would not with 1 / the measured seconds.
    """
    if not steps:
        raise ValueError("there are no steps to fit the cost model to")
    table = np.array(steps, dtype=np.float64)  # [N, 4]: tokens, context, samples, seconds
    seconds = table[:, 3]
    loads = np.column_stack([np.ones(len(steps)), table[:, :3]])  # [N, 4]
    model = np.full(len(steps), seconds.mean())
    solution = np.zeros(4)
    for _ in range(ROUNDS):
        solution = _least_squares(loads, seconds, 1 / np.maximum(model, LEAST_S))
        model = loads @ solution
    return CostFit(
        cost=CostModel(*solution.tolist()),
        num_steps=len(steps),
        total_error=float(model.sum() / seconds.sum() - 1),
        median_error=float(np.median(np.abs(model / seconds - 1))),
    )


def _least_squares(loads: DoubleArray, target: DoubleArray, weights: DoubleArray) -> DoubleArray:
    """The x >= 0 [4] that brings loads [N, 4] @ x nearest to target [N],
    by weights [N] of the squares.
    """
    # Columns of like size keep the normal equations well conditioned.
    scale = np.maximum(np.abs(loads).max(axis=0), 1e-300)
    scaled = loads / scale
    weighted = scaled * weights[:, None]
    matrix = scaled.T @ weighted
    vector = target @ weighted
    solution = solve_not_negative(matrix.tolist(), vector.tolist())
    unscaled: DoubleArray = np.array(solution) / scale
    return unscaled


def write_steps(name: str, steps: Iterable[StepTime]) -> None:
    """Write a CSV file with a line for each step."""
    with open(name, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(StepTime._fields)
        writer.writerows((*step[:3], f"{step.seconds:.9f}") for step in steps)


def read_steps(name: str) -> list[StepTime]:
    """Read what `write_steps` wrote; a file without num_samples has none.
    Raises ValueError for any other file.
    """
    steps = []
    with open(name, encoding="utf-8", newline="") as file:
        try:
            for line in csv.DictReader(file):
                step = StepTime(
                    num_tokens=int(line["num_tokens"]),
                    context=int(line["context"]),
                    num_samples=int(line.get("num_samples", 0)),
                    seconds=float(line["seconds"]),
                )
                steps.append(step)
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(
                f"{name} has no columns num_tokens, context, seconds with numbers: {exc}"
            ) from exc
    return steps
