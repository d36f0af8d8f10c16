"""How much of a prompt a step may compute while others wait for their next token.

Between two steps of the running requests, prompts get what is left of the bound, cut to measure by
what steps cost (`step_cost.py`); then the running requests have their turn. The shortest piece of a
prompt that is worth a step may always run between two turns, so prompts are not starved either.

The bound is a time (`max_step_ms`), or a multiple of what the running requests' own step takes
(`max_slowdown`). The second protects a request from prompts that came after it had begun, and not
from those of its own burst: these shall soon run beside it, for a full batch is the fastest.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.plan.step import Plan
from weft.scheduler.batch import Batch, RunningBatch
from weft.scheduler.pace.draft_cost import DraftCost
from weft.scheduler.pace.step_cost import CostEstimator, CostModel, StepLoad
from weft.scheduler.request import Columns
from weft.scheduler.settings import SchedulerSettings

# Of a step, as long as nothing is known; then at most twice what has been measured.
FIRST_TOKENS = 64
MIN_TOKENS = 16  # of a prompt, worth a step
# A bound by `max_slowdown` is never below this: nobody reads 100 tokens a second, and smaller
# pieces cost prompts more than they give to streams.
LEAST_BOUND_S = 0.01
NUM_KEPT = 32  # measured decode steps that wait to be learnt from
REFIT_STEPS = 64  # measured steps between two fits for who asks in every step


class StepBudget:
    """What the prompts of one step may take. `left_s`: seconds, of which there may be no end;
    below 0: none. `min_tokens`: so many are allowed to the first in any case."""

    def __init__(
        self, left_s: float, rates: tuple[float, float], max_tokens: int, min_tokens: int
    ) -> None:
        self.left_s = left_s
        self._token_s, self._pair_s = rates
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens

    def limit(self, start: int) -> int:
        """How many tokens behind `start` others fit: b·n + c·(start·n + n²/2) <= the seconds
        left."""
        fits = float(self._max_tokens)
        pair_s = self._pair_s
        left_s = max(self.left_s, 0.0)
        linear = self._token_s + pair_s * start  # b + c·start
        if pair_s > 0:
            root = math.sqrt(linear * linear + 2 * pair_s * left_s)
            fits = min(fits, (root - linear) / pair_s)
        elif linear > 0:
            fits = min(fits, left_s / linear)
        return max(int(fits), self._min_tokens)

    def layers(self, load: StepLoad) -> float:
        """How many layers fit of a prefill of this load, where rates are those of a layer."""
        layer_s = self._token_s * load.tokens + self._pair_s * load.pairs
        if layer_s <= 0:
            return math.inf
        return max(self.left_s, 0.0) / layer_s

    def spend(self, start: int, num_tokens: int) -> None:
        linear_s = self._token_s * num_tokens
        pairs_s = self._pair_s * num_tokens * (start + num_tokens / 2)
        self.left_s -= linear_s + pairs_s
        self._max_tokens -= num_tokens
        self._min_tokens = 0


class Waiting(NamedTuple):
    """The requests whose prompts are to be computed."""

    num: int
    first_arrival: int  # the arrival order of the open prompt, or else of the one that came first


NOBODY_WAITS = Waiting(0, 0)


class Pace:
    """Keeps the time between two tokens of running requests below a bound, as far as a single step
    allows."""

    def __init__(
        self, settings: SchedulerSettings, columns: Columns, running: RunningBatch
    ) -> None:
        self.cost = CostEstimator()
        self.draft_cost = DraftCost()
        self._max_step_s = settings.max_step_s or math.inf
        self._max_slowdown = settings.max_slowdown
        self._min_tokens = max(MIN_TOKENS, settings.page_size)
        # A prefill may stop behind each layer: a step then has room for as many tokens as one layer
        # has.
        self._num_pieces = settings.num_layers if settings.split_prefill_layers else 1
        self._columns = columns
        self._running = running
        self._largest = FIRST_TOKENS // 2  # tokens of a measured step
        # Most steps only decode, and most of them are not needed to know what a step costs. So they
        # are kept as they are until the cost is asked for.
        self._decodes: deque[tuple[Plan, float]] = deque(maxlen=NUM_KEPT)
        self._model: CostModel | None = None  # as of the last fit for who asks in every step
        self._num_since_fit = 0  # measured steps
        # What the steps take that were planned since the running requests' last one.
        self._since_s = 0.0

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step has taken so long on the device, without the work of an encoder."""
        plan = batch.plan
        if plan.drafting is not None:
            self.draft_cost.observe(plan, plan.drafting, seconds)
            return
        has_prefill = bool(batch.prefills) or plan.layers is not None
        if has_prefill or self._max_step_s < math.inf:
            self._learn()
            self.cost.observe(StepLoad.of(plan), seconds, has_prefill=has_prefill)
        else:
            self._decodes.append((plan, seconds))
        self._largest = max(self._largest, plan.num_tokens)
        self._num_since_fit += 1

    def planned(self, batch: Batch) -> None:
        """This is the next step."""
        if batch.plan.drafting is not None:
            return  # the running requests wait on
        has_decodes = batch.plan.layers is None and len(batch.rows) > len(batch.prefills)
        if has_decodes or not self._load(self._next_rows()).tokens:
            self._since_s = 0.0
            return
        self._learn()
        if self.cost.is_known:
            self._since_s += self.cost.seconds(StepLoad.of(batch.plan))
        else:
            self._since_s = math.inf

    def model(self) -> CostModel | None:
        """What steps cost, without the last few; None as long as too little is known."""
        if self._model is None or self._num_since_fit >= REFIT_STEPS:
            self._learn()
            self._num_since_fit = 0
            if self.cost.is_known:
                self._model = self.cost.model()
        return self._model

    @property
    def has_prefilled(self) -> bool:
        """Whether prompts were computed since the running requests' last step."""
        return self._since_s > 0

    def decode_is_due(self, waiting: Waiting) -> bool:
        """Whether the running requests must have their turn before any more of a prompt."""
        budget = self.budget(waiting, mixes=False)
        return budget is not None and budget.limit(0) < self._min_tokens

    def budget(self, waiting: Waiting, *, mixes: bool) -> StepBudget | None:
        """What prompts may take of the next step; None: anything. `mixes`: the running requests are
        in that step."""
        rows = self._next_rows()
        if not len(rows):
            return None
        slowdown = self._slowdown(rows, waiting)
        if slowdown == math.inf and self._max_step_s == math.inf:
            return None
        self._learn()
        max_tokens = 2 * self._largest
        min_tokens = 0 if self._since_s else self._min_tokens
        if not self.cost.is_known:
            left_s = 0.0 if self._since_s else math.inf
            return StepBudget(left_s, (1.0, 0.0), max_tokens, min_tokens)
        cost = self.cost.model()
        decode_s = cost.seconds(self._load(rows))
        bound_s = min(max(slowdown * decode_s, LEAST_BOUND_S), self._max_step_s)
        left_s = bound_s - self._since_s - decode_s
        if not mixes:
            # The running requests then have a step of their own, behind this one.
            left_s -= cost.step_s
        rates = cost.token_s / self._num_pieces, cost.pair_s / self._num_pieces
        return StepBudget(left_s, rates, max_tokens, min_tokens)

    def layers_in_time(self, load: StepLoad, waiting: Waiting) -> float:
        """How many layers of a prefill, which is this load as a whole, fit before the running
        requests' next step."""
        budget = self.budget(waiting, mixes=False)
        if budget is None:
            return math.inf
        return budget.layers(load)

    def _slowdown(self, rows: IntArray, waiting: Waiting) -> float:
        """How many times as long the next step of `rows` may take because of the prompts.

        The more requests wait for each that was there before them, the more it is.
        """
        if self._max_slowdown <= 0:
            return math.inf
        came_before = self._columns.num_arrived[rows] <= waiting.first_arrival
        num_before = int(np.count_nonzero(came_before))
        if not num_before:
            return math.inf
        pressure = max(waiting.num / num_before, 1.0)
        return 1 + (self._max_slowdown - 1) * pressure

    def _learn(self) -> None:
        """Take in the decode steps that were kept."""
        for plan, seconds in self._decodes:
            self.cost.observe(StepLoad.of(plan), seconds, has_prefill=False)
        self._decodes.clear()

    def _next_rows(self) -> IntArray:
        """Those that wait for their next token."""
        return self._columns.unfinished(self._running.rows)

    def _load(self, rows: IntArray) -> StepLoad:
        """What a step of `rows` alone has to do."""
        columns = self._columns
        seq_len = columns.seq_len[rows]
        lens = seq_len - columns.kv_len[rows]
        pairs = lens * seq_len
        return StepLoad(int(lens.sum()), int(pairs.sum()))
