"""How much of a prompt a step may compute while others wait for their next token.

Between two steps of the running requests, prompts get what is left of the bound, cut to measure by
what steps cost (`step_cost.py`); then the running requests have their turn. The shortest piece of a
prompt that is worth a step may always run between two turns, so prompts are not starved either.
"""

from __future__ import annotations

import math

from weft.scheduler.batch import Batch, RunningBatch
from weft.scheduler.pace.step_cost import CostEstimator, StepLoad
from weft.scheduler.request import Columns

# Of a step, as long as nothing is known; then at most twice what has been measured.
FIRST_TOKENS = 64
MIN_TOKENS = 16  # of a prompt, worth a step


class StepBudget:
    """What the prompts of one step may take. `min_tokens`: so many are allowed to the first in any
    case."""

    def __init__(
        self, left_s: float, rates: tuple[float, float], max_tokens: int, min_tokens: int
    ) -> None:
        self._left_s = left_s
        self._token_s, self._pair_s = rates
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens

    def limit(self, start: int) -> int:
        """How many tokens behind `start` others fit: b·n + c·(start·n + n²/2) <= the seconds
        left."""
        fits = float(self._max_tokens)
        pair_s = self._pair_s
        left_s = max(self._left_s, 0.0)
        linear = self._token_s + pair_s * start  # b + c·start
        if pair_s > 0:
            root = math.sqrt(linear * linear + 2 * pair_s * left_s)
            fits = min(fits, (root - linear) / pair_s)
        elif linear > 0:
            fits = min(fits, left_s / linear)
        return max(int(fits), self._min_tokens)

    def spend(self, start: int, num_tokens: int) -> None:
        linear_s = self._token_s * num_tokens
        pairs_s = self._pair_s * num_tokens * (start + num_tokens / 2)
        self._left_s -= linear_s + pairs_s
        self._max_tokens -= num_tokens
        self._min_tokens = 0


class Pace:
    """Keeps the time between two tokens of a running request below `max_step_s`, as far as a single
    step allows."""

    def __init__(
        self, max_step_s: float, page_size: int, columns: Columns, running: RunningBatch
    ) -> None:
        self.cost = CostEstimator()
        self._max_step_s = max_step_s
        self._min_tokens = max(MIN_TOKENS, page_size)
        self._columns = columns
        self._running = running
        self._largest = FIRST_TOKENS // 2  # tokens of a measured step
        # What the steps take that were planned since the running requests' last one.
        self._since_s = 0.0

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step has taken so long on the device."""
        self.cost.observe(StepLoad.of(batch.plan), seconds, has_prefill=bool(batch.prefills))
        self._largest = max(self._largest, batch.plan.num_tokens)

    def planned(self, batch: Batch) -> None:
        """This is the next step."""
        has_decodes = len(batch.rows) > len(batch.prefills)
        if has_decodes or not self._waiting_load().tokens:
            self._since_s = 0.0
        elif self.cost.is_known:
            self._since_s += self.cost.seconds(StepLoad.of(batch.plan))
        else:
            self._since_s = math.inf

    def decode_is_due(self) -> bool:
        """Whether the running requests must have their turn before any more of a prompt."""
        if not self._since_s:
            return False
        budget = self.budget(mixes=False)
        return budget is not None and budget.limit(0) < self._min_tokens

    def budget(self, *, mixes: bool) -> StepBudget | None:
        """What prompts may take of the next step; None: anything. `mixes`: the running requests are
        in that step."""
        load = self._waiting_load()
        if not load.tokens:
            return None
        max_tokens = 2 * self._largest
        min_tokens = 0 if self._since_s else self._min_tokens
        if not self.cost.is_known:
            left_s = 0.0 if self._since_s else math.inf
            return StepBudget(left_s, (1.0, 0.0), max_tokens, min_tokens)
        cost = self.cost.model()
        left_s = self._max_step_s - self._since_s - cost.seconds(load)
        if not mixes:
            # The running requests then have a step of their own, behind this one.
            left_s -= cost.step_s
        return StepBudget(left_s, (cost.token_s, cost.pair_s), max_tokens, min_tokens)

    def _waiting_load(self) -> StepLoad:
        """A step of the requests that wait for their next token."""
        columns = self._columns
        rows = columns.unfinished(self._running.rows)
        seq_len = columns.seq_len[rows]
        lens = seq_len - columns.kv_len[rows]
        pairs = lens * seq_len
        return StepLoad(int(lens.sum()), int(pairs.sum()))
