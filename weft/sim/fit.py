"""Fits the cost model to measured steps: a file of steps, and least squares with coefficients that
are not negative.

It does not know how steps are measured (`weft/bench/testbed.py` does that).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.scheduler.pace.step_cost import CostModel, StepLoad, solve_not_negative
from weft.sim.encoder import EncoderCost, EncoderTime

DoubleArray: TypeAlias = NDArray[np.float64]

ROUNDS = 8
USUAL_ROUNDS = 40
LEAST_DIFFERENCE = 0.01  # of a step's time: smaller differences do not get more weight
LEAST_S = 1e-9


class StepTime(NamedTuple):
    """One step: its load, and the seconds it took."""

    num_tokens: int
    context: int
    num_samples: int
    seconds: float
    num_pairs: int = 0  # pairs of a token and one that it attends to; 0: not known


class CostFit(NamedTuple):
    cost: CostModel
    num_steps: int
    total_error: float  # of the sum of all seconds: model / measured - 1
    median_error: float  # of single steps, absolute

    @property
    def text(self) -> str:
        """The cost as a value for `--cost`: a,b,c,d."""
        return ",".join(f"{value:.6g}" for value in self.cost[:4])


def fit(steps: Sequence[StepTime]) -> CostFit:
    """Fit seconds per step, token, token of context and sample. Raises ValueError without steps.

    A step weighs 1 / the seconds that the model gives it (found iteratively): so the many short
    steps count as much as the few long ones, and the sums of model and measurement agree, which
    they would not with 1 / the measured seconds.
    """
    if not steps:
        raise ValueError("there are no steps to fit the cost model to")
    # [N, 5]: tokens, context, samples, seconds, pairs
    table = np.array(steps, dtype=np.float64)
    seconds = table[:, 3]
    ones = np.ones(len(steps))  # the fixed cost of each step
    loads = np.column_stack([ones, table[:, :3]])  # [N, 4]
    model = np.full(len(steps), seconds.mean())
    solution = np.zeros(4)
    for _ in range(ROUNDS):
        weights = 1 / np.maximum(model, LEAST_S)
        solution = _least_squares(loads, seconds, weights)
        model = loads @ solution
    total_error = model.sum() / seconds.sum() - 1
    errors = np.abs(model / seconds - 1)
    return CostFit(
        cost=CostModel(*solution.tolist()),
        num_steps=len(steps),
        total_error=float(total_error),
        median_error=float(np.median(errors)),
    )


def fit_usual(steps: Sequence[StepTime]) -> CostFit:
    """Like `fit`, for steps of which some were disturbed: half of the steps take less than the
    model says, and half more. A few steps that took a hundred times as long change nothing.

    Least absolute differences, by least squares with weights that are found iteratively.
    """
    first = fit(steps)
    table = np.array(steps, dtype=np.float64)
    seconds = table[:, 3]
    loads = np.column_stack([np.ones(len(steps)), table[:, :3]])
    solution = np.array(first.cost[:4])
    for _ in range(USUAL_ROUNDS):
        model = np.maximum(loads @ solution, LEAST_S)
        difference = np.maximum(np.abs(seconds - model), LEAST_DIFFERENCE * model)
        solution = _least_squares(loads, seconds, 1 / (model * difference))
    model = np.maximum(loads @ solution, LEAST_S)
    return CostFit(
        cost=CostModel(*solution.tolist()),
        num_steps=len(steps),
        total_error=float(model.sum() / seconds.sum() - 1),
        median_error=float(np.median(np.abs(model / seconds - 1))),
    )


def fit_encoder(times: Sequence[EncoderTime]) -> EncoderCost:
    """Fit seconds per item and per token, with weights like those of `fit`. Raises ValueError if
    nothing was encoded.
    """
    if not times:
        raise ValueError("nothing was encoded that the cost could be fitted to")
    table = np.array(times, dtype=np.float64)  # [N, 3]: items, tokens, seconds
    loads = table[:, :2]
    seconds = table[:, 2]
    model = np.full(len(times), seconds.mean())
    solution = np.zeros(2)
    for _ in range(ROUNDS):
        solution = _least_squares(loads, seconds, 1 / np.maximum(model, LEAST_S))
        model = loads @ solution
    return EncoderCost(*solution.tolist())


class WatchedCost:
    """A cost model that was fitted to steps. It measures the share of a run in steps larger than
    any of these: their cost is extrapolated on a straight line."""

    BEYOND = 1.25  # times the largest measured step

    def __init__(self, cost: CostModel, steps: Sequence[StepTime]) -> None:
        self._cost = cost
        self._most_tokens = self.BEYOND * max((step.num_tokens for step in steps), default=0)
        self._most_context = self.BEYOND * max((step.context for step in steps), default=0)
        self._total_s = 0.0
        self._beyond_s = 0.0

    @property
    def guessed_share(self) -> float:
        """Share of the time of all steps that is spent in steps larger than any measured one."""
        return self._beyond_s / max(self._total_s, LEAST_S)

    def seconds(self, load: StepLoad) -> float:
        seconds = self._cost.seconds(load)
        self._total_s += seconds
        if load.tokens > self._most_tokens or load.context > self._most_context:
            self._beyond_s += seconds
        return seconds


def _least_squares(
    loads: DoubleArray,
    target: DoubleArray,
    weights: DoubleArray,
) -> DoubleArray:
    """The x >= 0 [4] that minimizes the squared differences of loads [N, 4] @ x and target [N],
    weighted by weights [N]."""
    # Columns of similar magnitude keep the normal equations well conditioned.
    largest = np.abs(loads).max(axis=0)
    scale = np.maximum(largest, 1e-300)
    scaled = loads / scale
    weighted = scaled * weights[:, None]
    matrix = scaled.T @ weighted
    vector = target @ weighted
    solution = solve_not_negative(matrix.tolist(), vector.tolist())
    unscaled: DoubleArray = np.array(solution) / scale
    return unscaled


def write_steps(name: str, steps: Iterable[StepTime]) -> None:
    """Write a CSV file with one line per step."""
    with open(name, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(StepTime._fields)
        writer.writerows((*step[:3], f"{step.seconds:.9f}", step.num_pairs) for step in steps)


def read_steps(name: str) -> list[StepTime]:
    """Read a file of `write_steps`; samples and pairs are 0 if it has no columns for them. Raises
    ValueError for any other file.
    """
    steps = []
    with open(name, encoding="utf-8-sig", newline="") as file:
        try:
            for line in csv.DictReader(file):
                step = StepTime(
                    num_tokens=int(line["num_tokens"]),
                    context=int(line["context"]),
                    num_samples=int(line.get("num_samples", 0)),
                    seconds=float(line["seconds"]),
                    num_pairs=int(line.get("num_pairs") or 0),
                )
                steps.append(step)
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(
                f"{name} has no columns num_tokens, context, seconds with numbers: {exc}"
            ) from exc
    if not steps:
        raise ValueError(f"{name} has no lines with steps")
    return steps
