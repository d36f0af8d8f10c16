"""The cost of a step as a curve over its tokens, for predictions at loads that were never measured.

    seconds = step + sum of (slope · tokens, by piece) + context · context + pair · pairs
              + sample · samples

A straight line does not fit a processor: a step of few tokens reads all weights and computes little
(memory bandwidth, shared by its rows), one of many tokens computes (cores). So the slope may differ
from piece to piece; between pieces without measurements it changes as little as possible. `samples`
carry what each new token costs besides: the head, and the front that sends it on the same cores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.scheduler.pace.step_cost import StepLoad
from weft.sim.fit import LEAST_DIFFERENCE, LEAST_S, DoubleArray, StepTime

# A piece goes from one of these numbers of tokens to the next.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048)
CURVE_ROUNDS = 25
# How much two neighbouring slopes resist to differ, as a part of the weight of all steps.
STIFFNESS = 3e-4
USUAL_PERCENT = 50.0
MAX_STRETCH = 4.0  # a step that took more than this multiple was disturbed


class StepCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A `StepCost`. No term is negative."""

    step_s: float  # of a step with one token, without the terms below
    knots: tuple[int, ...]  # in tokens, ascending
    token_s: tuple[float, ...]  # seconds per token in the piece that begins at each knot
    context_s: float = 0.0
    sample_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return self.parts(load).total_s

    def parts(self, load: StepLoad) -> CostParts:
        """The seconds of a step by what they are spent on."""
        compute_s = 0.0
        tokens = load.tokens
        for index in range(bisect_right(self.knots, tokens)):
            begin = self.knots[index]
            end = tokens
            if index + 1 < len(self.knots):
                end = min(tokens, self.knots[index + 1])
            num_tokens = end - begin
            compute_s += self.token_s[index] * num_tokens
        return CostParts(
            weights_s=self.step_s,
            compute_s=compute_s + self.pair_s * load.pairs,
            context_s=self.context_s * load.context,
            sample_s=self.sample_s * load.samples,
        )

    def times(self, factor: float) -> StepCurve:
        """The cost on a machine on which all steps take `factor` times as long."""
        return StepCurve(
            step_s=factor * self.step_s,
            knots=self.knots,
            token_s=tuple(factor * slope for slope in self.token_s),
            context_s=factor * self.context_s,
            sample_s=factor * self.sample_s,
            pair_s=factor * self.pair_s,
        )


class CostParts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, or of many."""

    weights_s: float  # what any step costs: reading all weights, and the work around it
    compute_s: float  # what its tokens add
    context_s: float  # reading the KV that its tokens attend to
    sample_s: float  # the head, sampling, and sending of new tokens

    @property
    def total_s(self) -> float:
        device_s = self.weights_s + self.compute_s
        others_s = self.context_s + self.sample_s
        return device_s + others_s


class CurveFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted curve, and how well it meets the steps that it was fitted to."""

    curve: StepCurve
    num_steps: int
    total_error: float  # of the sum of all seconds: model / measured - 1
    median_error: float  # of single steps, absolute


def fit_curve(steps: Sequence[StepTime]) -> CurveFit:
    """Fit a curve. Half of the steps take less than the model says, and half more; then all terms
    are scaled so that the sum of all seconds is met, too. Raises ValueError without steps."""
    if not steps:
        raise ValueError("there are no steps to fit the cost model to")
    measured = np.array(steps, dtype=np.float64)  # [N, 5] as the fields of `StepTime`
    tokens = measured[:, 0]
    seconds = measured[:, 3]
    knots = tuple(knot for knot in KNOTS if knot < tokens.max()) or KNOTS[:1]
    loads = _columns(measured, knots)
    largest = np.abs(loads).max(axis=0)
    scale = np.maximum(largest, 1e-300)
    scaled = loads / scale
    bends = _bends(len(knots), scale)
    order = np.argsort(tokens, kind="stable")
    by_tokens = tokens[order]
    model = np.full(len(steps), seconds.mean())
    solution = np.zeros(loads.shape[1])
    for number in range(CURVE_ROUNDS):
        difference = model
        if number:
            least = LEAST_DIFFERENCE * model
            difference = np.abs(seconds - model)
            difference = np.maximum(difference, least)
        difference = np.maximum(difference, LEAST_S)
        usual_s = np.maximum(model, LEAST_S)
        weights = 1 / (usual_s * difference)
        weighted = scaled * weights[:, None]
        matrix = scaled.T @ weighted
        # As a part of the time of a step of that size: a bend weighs as much there as anywhere.
        times_s = np.maximum(model[order], LEAST_S)
        usual = np.interp(knots, by_tokens, times_s)[:-1]
        relative = bends / (usual * usual)[:, None]
        stiffness = STIFFNESS * float((weights * model * model).sum())
        matrix += stiffness * (bends.T @ relative)
        vector = weighted.T @ seconds
        solution = not_negative(matrix, vector)
        model = scaled @ solution
        model = np.maximum(model, LEAST_S)
    factor = _factor(seconds, model)
    terms: list[float] = (factor * solution / scale).tolist()
    curve = StepCurve(
        step_s=terms[0],
        knots=knots,
        token_s=tuple(terms[4:]),
        context_s=terms[1],
        sample_s=terms[2],
        pair_s=terms[3],
    )
    model = factor * model
    total_ratio = model.sum() / seconds.sum()
    errors = np.abs(model / seconds - 1)
    return CurveFit(
        curve=curve,
        num_steps=len(steps),
        total_error=float(total_ratio - 1),
        median_error=float(np.median(errors)),
    )


def _columns(measured: DoubleArray, knots: Sequence[int]) -> DoubleArray:
    """[N, 4 + pieces] a one, context, samples, pairs, and the tokens within each piece."""
    tokens = measured[:, 0]
    ones = np.ones(len(measured))
    context = measured[:, 1]
    samples = measured[:, 2]
    pairs = measured[:, 4]
    columns = [ones, context, samples, pairs]
    ends = [*knots[1:], np.inf]
    for knot, end in zip(knots, ends, strict=True):
        beyond = tokens - knot
        columns.append(np.clip(beyond, 0, end - knot))
    return np.column_stack(columns)


def _bends(num_pieces: int, scale: DoubleArray) -> DoubleArray:
    """[pieces - 1, 4 + pieces] @ scaled terms: by how much each slope differs from the next one, in
    seconds over the shorter of their pieces."""
    rows: NDArray[np.float64] = np.zeros((max(num_pieces - 1, 0), 4 + num_pieces))
    for index in range(num_pieces - 1):
        width = scale[4 + index]
        rows[index, 4 + index] = width / scale[4 + index]
        rows[index, 5 + index] = -width / scale[5 + index]
    return rows


def _factor(seconds: DoubleArray, model: DoubleArray) -> float:
    """What the model must be multiplied with so that its sum is that of the measured seconds,
    without those that something else disturbed."""
    longest = MAX_STRETCH * model
    usual = np.minimum(seconds, longest)
    total_s = float(usual.sum())
    return total_s / float(model.sum())


def not_negative(matrix: DoubleArray, vector: DoubleArray) -> DoubleArray:
    """The x >= 0 [N] that minimises x·matrix·x / 2 - vector·x, for a matrix [N, N] that is positive
    semidefinite.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    size = len(vector)
    x: NDArray[np.float64] = np.zeros(size)
    is_free = np.zeros(size, dtype=np.bool_)
    tolerance = 1e-12 * float(np.abs(vector).max(initial=0.0))
    for _ in range(3 * size):
        gradient = vector - matrix @ x
        gradient[is_free] = -np.inf
        best = int(np.argmax(gradient))
        if not gradient[best] > tolerance:
            break
        is_free[best] = True
        while is_free.any():
            free = np.flatnonzero(is_free)
            part = matrix[np.ix_(free, free)]
            solved = np.linalg.lstsq(part, vector[free], rcond=1e-13)
            target = solved[0]
            if (target > 0).all():
                x[:] = 0
                x[free] = target
                break
            # Go as far as no term becomes negative, and leave those out that are 0 there.
            is_low = target <= 0
            now = x[free]
            way = np.maximum(now - target, 1e-300)
            part_of_way = (now / way)[is_low]
            now += float(part_of_way.min()) * (target - now)
            least = 1e-15 * np.abs(now).max(initial=1.0)
            is_out = is_low & (now <= least)
            x[free] = now
            is_free[free[is_out]] = False
            x[~is_free] = 0
    return x
