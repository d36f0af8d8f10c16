"""How long steps take, learnt while they run: seconds = a + b · tokens + c · pairs.

`tokens` are those that a step computes, `pairs` those of a token and one that it attends to. Least squares that
forgets, with coefficients that are not negative. Plain Python floats and no library: a replay on another machine must
come to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from weft.plan.step import Plan

FORGET = 0.98  # what a measurement weighs after another of its kind
MAX_SURPRISE = 4.0  # a step that takes longer than so many times what was expected counts as that: others disturbed it


class Load(NamedTuple):
    """What a step has to do."""

    tokens: int
    pairs: int

    @classmethod
    def of(cls, plan: Plan) -> Load:
        lens = plan.lens.astype(np.int64)
        return cls(plan.num_tokens, int((lens * plan.starts + lens * (lens + 1) // 2).sum()))


class Sums:
    """The normal equations of least squares, older measurements weighing less."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * 3 for _ in range(3)]
        self.vector = [0.0] * 3

    def add(self, row: Sequence[float], target: float, weight: float) -> None:
        for i in range(3):
            for j in range(3):
                self.matrix[i][j] = FORGET * self.matrix[i][j] + weight * row[i] * row[j]
            self.vector[i] = FORGET * self.vector[i] + weight * row[i] * target


class StepCost:
    """Steps with prompts and decode steps are forgotten apart: a thousand decode steps teach nothing of prompts."""

    UNITS = (1.0, 256.0, 65_536.0)  # the columns are of like size in these

    def __init__(self) -> None:
        self._prefills = Sums()
        self._decodes = Sums()
        self._num = [0, 0]  # measured decode steps, steps with prompts
        self._fitted: tuple[float, float, float] | None = None
        self._is_stale = False  # there are newer measurements than the fit

    @property
    def is_known(self) -> bool:
        return all(self._num)

    def observe(self, load: Load, seconds: float, *, has_prefill: bool) -> None:
        """A step has taken so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if self._fitted is not None and self.is_known:
            a, b, c = self._fitted
            seconds = min(seconds, MAX_SURPRISE * max(a + b * load.tokens + c * load.pairs, 1e-4))
        row = [value / unit for value, unit in zip((1, *load), self.UNITS, strict=True)]
        (self._prefills if has_prefill else self._decodes).add(row, seconds, 1 / max(seconds, 1e-4))
        self._num[has_prefill] += 1
        self._is_stale = True

    def coefficients(self) -> tuple[float, float, float]:
        """a, b, c: seconds for a step, a token, a pair. None is negative."""
        if self._fitted is None or self._is_stale:
            matrix = [
                [x + y for x, y in zip(*rows, strict=True)]
                for rows in zip(self._prefills.matrix, self._decodes.matrix, strict=True)
            ]
            vector = [
                x + y for x, y in zip(self._prefills.vector, self._decodes.vector, strict=True)
            ]
            a, b, c = (
                x / unit for x, unit in zip(_not_negative(matrix, vector), self.UNITS, strict=True)
            )
            self._fitted = a, b, c
            self._is_stale = False
        return self._fitted

    def seconds(self, load: Load) -> float:
        a, b, c = self.coefficients()
        return a + b * load.tokens + c * load.pairs


def _not_negative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The x >= 0 that minimises x·matrix·x / 2 - vector·x: the best of all subsets of three that come out positive."""
    best, lowest = [0.0] * 3, 0.0
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solution = _solve(
                [[matrix[i][j] for j in chosen] for i in chosen], [vector[i] for i in chosen]
            )
            if solution is None or min(solution) < 0:
                continue
            value = -sum(
                x * vector[i] for x, i in zip(solution, chosen, strict=True)
            )  # at the minimum, twice it
            if value < lowest:
                lowest, best = value, [0.0] * 3
                for x, i in zip(solution, chosen, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
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
