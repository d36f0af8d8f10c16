"""The cost model of a step: its time as a function of its load. It is learnt online, or fitted to a
file of measurements.

    seconds = step + token · tokens + pair · pairs + context · context + sample · samples

`tokens` are computed in the step, `pairs` are pairs of a token and one that it attends to,
`context` is the number of KV entries that attention reads, `samples` the number of sampled tokens.
The scheduler learns the first three terms while steps run (`CostEstimator`); the simulator fits or
is given four of them (`weft/sim/cost.py`). This module knows nothing of requests.

It uses plain Python floats, so that a replay on another machine computes the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.plan.step import Plan

Matrix = list[list[float]]

FORGET = 0.98  # weight of a measurement after the next one of its kind
# A measured time is limited to this multiple of the expected time: a longer step was disturbed by
# something else.
MAX_SURPRISE = 4.0
MIN_STEP_S = 1e-4


class StepLoad(NamedTuple):
    """The work of one step."""

    tokens: int  # computed tokens
    pairs: int  # pairs of a token and one that it attends to
    context: int = 0  # sum of the KV lengths that attention reads, in tokens
    samples: int = 0

    @classmethod
    def of(cls, plan: Plan) -> StepLoad:
        load = cls.of_tokens(plan.starts, plan.lens)
        load = load._replace(samples=len(plan.sampling.seeds))
        if plan.layers is None:
            return load
        return load.times(plan.layers.part)

    @classmethod
    def of_tokens(cls, starts: IntArray, lens: IntArray) -> StepLoad:
        """The load of computing `lens` [R] tokens after `starts` [R] others of each request."""
        long_lens = lens.astype(np.int64)
        pairs = long_lens * starts + long_lens * (long_lens + 1) // 2
        num_tokens = int(long_lens.sum())
        return cls(num_tokens, int(pairs.sum()), context=int(starts.sum()) + num_tokens)

    def times(self, part: float) -> StepLoad:
        """The load of a step with this fraction of the layers."""
        return self._replace(
            tokens=int(self.tokens * part),
            pairs=int(self.pairs * part),
            context=int(self.context * part),
        )


class CostModel(NamedTuple):
    """Seconds per step and per unit of its load. No term is negative."""

    step_s: float
    token_s: float
    context_s: float = 0.0
    sample_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return (
            self.step_s
            + self.token_s * load.tokens
            + self.pair_s * load.pairs
            + self.context_s * load.context
            + self.sample_s * load.samples
        )


class NormalEquations:
    """Normal equations of weighted least squares: matrix [N, N] @ x = vector [N]. The weight of
    older rows may decay."""

    def __init__(self, size: int, forget: float = 1.0) -> None:
        self.matrix: Matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size
        self._forget = forget

    def add(self, row: Sequence[float], target: float, weight: float) -> None:
        """Add the equation row [N] @ x = target."""
        for i in range(len(self.vector)):
            for j in range(len(self.vector)):
                self.matrix[i][j] = self._forget * self.matrix[i][j] + weight * row[i] * row[j]
            self.vector[i] = self._forget * self.vector[i] + weight * row[i] * target


class CostEstimator:
    """Learns the terms of step, tokens and pairs. Steps with prompts and decode steps decay
    separately, because a thousand decode steps say nothing about prompts."""

    # In these units, step, tokens and pairs have values of similar size.
    UNITS = (1.0, 256.0, 65_536.0)

    def __init__(self) -> None:
        self._prefills = NormalEquations(3, FORGET)
        self._decodes = NormalEquations(3, FORGET)
        self._num = [0, 0]  # measured decode steps, steps with prompts
        self._fitted: CostModel | None = None
        self._is_stale = False  # whether there are measurements after the last fit

    @property
    def is_known(self) -> bool:
        return all(self._num)

    @property
    def lacks_decodes(self) -> bool:
        """Whether it has measured steps with prompts, but no decode steps."""
        return self._num[1] > 0 and not self._num[0]

    def observe(self, load: StepLoad, seconds: float, *, has_prefill: bool) -> None:
        """A step has taken `seconds`."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if self._fitted is not None and self.is_known:
            expected_s = max(self._fitted.seconds(load), MIN_STEP_S)
            seconds = min(seconds, MAX_SURPRISE * expected_s)
        units = self.UNITS
        row = [1 / units[0], load.tokens / units[1], load.pairs / units[2]]
        equations = self._prefills if has_prefill else self._decodes
        equations.add(row, seconds, 1 / max(seconds, MIN_STEP_S))
        self._num[has_prefill] += 1
        self._is_stale = True

    def model(self) -> CostModel:
        """The cost model that fits the measurements best."""
        if self._fitted is None or self._is_stale:
            self._fitted = self._fit()
            self._is_stale = False
        return self._fitted

    def seconds(self, load: StepLoad) -> float:
        return self.model().seconds(load)

    def _fit(self) -> CostModel:
        matrix: Matrix = []
        for prefills, decodes in zip(self._prefills.matrix, self._decodes.matrix, strict=True):
            matrix.append(_sum(prefills, decodes))
        vector = _sum(self._prefills.vector, self._decodes.vector)
        solution = solve_not_negative(matrix, vector)
        step_s, token_s, pair_s = (x / unit for x, unit in zip(solution, self.UNITS, strict=True))
        return CostModel(step_s, token_s, pair_s=pair_s)


def _sum(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(one, other, strict=True)]


def solve_not_negative(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    """The x >= 0 [N] that minimises x·matrix·x / 2 - vector·x.

    With three or four unknowns, all subsets can be tried: the answer is the best subset whose
    solution is positive.
    """
    num_unknowns = len(vector)
    best = [0.0] * num_unknowns
    lowest = 0.0
    for size in range(1, num_unknowns + 1):
        for chosen in combinations(range(num_unknowns), size):
            part = [[matrix[i][j] for j in chosen] for i in chosen]
            solution = _solve(part, [vector[i] for i in chosen])
            if solution is None or min(solution) < 0:
                continue
            # At the minimum, this is twice the value of the function.
            value = -sum(x * vector[i] for x, i in zip(solution, chosen, strict=True))
            if value < lowest:
                lowest = value
                best = [0.0] * num_unknowns
                for x, i in zip(solution, chosen, strict=True):
                    best[i] = x
    return best


def _solve(matrix: Matrix, vector: Sequence[float]) -> list[float] | None:
    """Gaussian elimination with a positive definite matrix; None if it is singular, or nearly."""
    n = len(vector)
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    for i in range(n):
        if rows[i][i] <= 1e-9 * matrix[i][i] or rows[i][i] <= 0:
            return None
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, n))
        solution[i] = (rows[i][n] - rest) / rows[i][i]
    return solution
