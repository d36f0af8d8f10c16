"""How much of a prompt a step may compute while others wait for their next token.

Between two steps of the running requests, prompts get the rest of the bound, cut by the measured
cost of steps (`step_cost.py`); then the running requests have their turn. The shortest useful piece
of a prompt may always run between two turns, so prompts do not starve either.

The bound is a time (`max_step_ms`), or a multiple of what the running requests' own step takes
(`max_slowdown`). The second protects a request from prompts that came after it had begun, and not
from those of its own burst: these shall soon run beside it, for a full batch is the fastest.

The time bound holds for nine of ten steps, because it is divided by the ratio by which steps took
longer than expected (`Margin`); it holds for drafts as for prompts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.plan.step import Plan
from weft.scheduler.batch import Batch, RunningBatch
from weft.scheduler.pace.draft_cost import DraftCost, size_of
from weft.scheduler.pace.room import StepRoom
from weft.scheduler.pace.step_cost import MIN_STEP_S, CostEstimator, CostModel, StepLoad
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings

# Of a step, until costs are known; then at most twice the largest measured step.
FIRST_TOKENS = 64
MIN_TOKENS = 8  # of a prompt: the shortest piece that is worth a step
# A bound by `max_slowdown` is never below this: no user reads 100 tokens a second, and smaller
# pieces would delay prompts more than they speed up streams.
LEAST_BOUND_S = 0.01
# One in this many steps with prompts may take longer than the margin allows.
RARE = 10
MARGIN_RATE = 0.05  # by which a longer step raises the margin
MAX_MARGIN = 2.0
FIRST_MARGIN = 1.6  # before a step was measured, because estimates from few steps are poor
NUM_CAREFUL = 16  # measured steps over which this extra margin falls to 0
NUM_KEPT = 32  # measured decode steps that are stored until costs are needed
# For callers that ask in every step: measured steps between two fits. A fit takes 0.3 ms and more
# of the host, so short steps have more of them between, of so many seconds together.
REFIT_STEPS = 64
MOST_REFIT_STEPS = 512
REFIT_S = 0.4


class StepBudget:
    """The part of one step that prompts may take. `left_s`: seconds, perhaps infinite; below 0:
    none. `min_tokens`: the first prompt may always have this many."""

    def __init__(
        self, left_s: float, rates: tuple[float, float], max_tokens: int, min_tokens: int
    ) -> None:
        self.left_s = left_s
        self._token_s, self._pair_s = rates
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens

    def limit(self, start: int) -> int:
        """How many tokens after `start` fit: b·n + c·(start·n + n²/2) <= the seconds left."""
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
        """How many layers fit of a prefill with this load, if the rates are those of one layer."""
        layer_s = self._layer_s(load)
        if layer_s <= 0:
            return math.inf
        return max(self.left_s, 0.0) / layer_s

    def spend_layers(self, load: StepLoad, num_layers: int) -> None:
        """Spend `num_layers` layers for the tokens of this load; one of them is spent already."""
        self.left_s -= (num_layers - 1) * self._layer_s(load)

    def spend(self, start: int, num_tokens: int) -> None:
        linear_s = self._token_s * num_tokens
        pairs_s = self._pair_s * num_tokens * (start + num_tokens / 2)
        self.left_s -= linear_s + pairs_s
        self._max_tokens -= num_tokens
        self._min_tokens = 0

    def _layer_s(self, load: StepLoad) -> float:
        return self._token_s * load.tokens + self._pair_s * load.pairs


class Margin:
    """The factor by which steps take longer than expected, for nine of ten steps. It is learnt
    online: a longer step raises it, and every other step lowers it by a ninth of that. It is higher
    for the first steps, whose cost is estimated from few measurements."""

    def __init__(self) -> None:
        self._learnt = 1.0
        self._num_seen = 0

    @property
    def factor(self) -> float:
        left = max(1 - self._num_seen / NUM_CAREFUL, 0.0)
        return max(self._learnt, 1 + (FIRST_MARGIN - 1) * left)

    def observe(self, expected_s: float, seconds: float) -> None:
        """A step was expected to take `expected_s`, and has taken `seconds`."""
        if not math.isfinite(seconds) or expected_s <= 0:
            return
        change = -MARGIN_RATE / (RARE - 1)
        if seconds > self._learnt * expected_s:
            change = MARGIN_RATE
        self._learnt = min(max(self._learnt + change, 1.0), MAX_MARGIN)
        self._num_seen += 1


class Waiting(NamedTuple):
    """The requests whose prompts wait to be computed."""

    num: int
    # Requests that had come before the open prompt could run, or else the oldest waiting request.
    num_before: int
    is_background: bool = False  # all of them are background requests
    beside_background: bool = False  # there are background requests, too


NOBODY_WAITS = Waiting(0, 0)


def guard_from_open(open_prompt: Request, columns: Columns, rows: Sequence[int]) -> None:
    """Let an open prompt count as one that came later for those of `rows`, which begin to decode,
    that arrived when it had been begun: they are not of its burst."""
    num_before = columns.num_arrived[open_prompt.row]
    for row in rows:
        if columns.requests[row].spec.arrival_order >= num_before:
            columns.num_arrived[row] = open_prompt.spec.num_before


class StepBounds(NamedTuple):
    """How long steps may take, by the settings."""

    are_any: bool  # beside those of background requests
    max_step_s: float
    max_slowdown: float
    background_s: float  # of steps without online requests
    min_tokens: int  # of a prompt in a step
    # A prefill may stop after each layer: a step then has room for as many tokens as one layer has.
    num_pieces: int

    @classmethod
    def of(cls, settings: SchedulerSettings) -> StepBounds:
        return cls(
            are_any=settings.bounds_steps,
            max_step_s=settings.max_step_s or math.inf,
            max_slowdown=settings.max_slowdown,
            background_s=settings.background_step_ms / 1_000 or math.inf,
            min_tokens=max(MIN_TOKENS, settings.page_size),
            num_pieces=settings.num_layers if settings.split_prefill_layers else 1,
        )


class Pace:
    """Keeps the time between two tokens of running requests below a bound, as far as a single step
    allows."""

    def __init__(
        self, settings: SchedulerSettings, columns: Columns, running: RunningBatch
    ) -> None:
        self.cost = CostEstimator()
        self._margin = Margin()
        self.draft_cost = DraftCost()
        self._bounds = StepBounds.of(settings)
        self._columns = columns
        self._running = running
        self._largest = FIRST_TOKENS // 2  # tokens of a measured step
        # Most steps only decode, and few of them are needed to know the cost of a step. So they are
        # stored until the cost is asked for.
        self._decodes: deque[tuple[Plan | StepLoad, float]] = deque(maxlen=NUM_KEPT)
        self._model: CostModel | None = None  # the last fit for callers that ask in every step
        self._num_since_fit = 0  # measured steps
        self._next_fit = 0  # value of `_num_since_fit` for the next one
        # The cost of the steps that were planned since the last step of the running requests; above
        # 0 if prompts were computed since then.
        self.since_s = 0.0
        self._budget: StepBudget | None = None  # of the last pass
        # Drafts of online requests in the last step that had some of their rows.
        self._num_drafts = 0
        # How long steps may take for background requests; None: none has come yet.
        self.room: StepRoom | None = None

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step has taken `seconds` on the device, without the work of an encoder."""
        plan = batch.plan
        if plan.drafting is not None:
            self.draft_cost.observe(plan, plan.drafting, seconds)
            return
        has_prefill = bool(batch.prefills) or plan.layers is not None
        if has_prefill or self._bounds.max_step_s < math.inf:
            self._learn()
            load = StepLoad.of(plan)
            is_cut = has_prefill or plan.drafts is not None  # to fit into its time
            if is_cut and self._bounds.max_step_s < math.inf and self.cost.is_known:
                self._margin.observe(self.cost.seconds(load), seconds)
            self.cost.observe(load, seconds, has_prefill=has_prefill)
        else:
            self._decodes.append((plan, seconds))
        self._largest = max(self._largest, plan.num_tokens)
        self._num_since_fit += 1
        if self.room is not None:
            self.room.observe(plan.step, seconds)

    def decoded(self, starts: IntArray, seconds: Sequence[float]) -> None:
        """Steps have been planned and have taken `seconds`. The first computed a token of each
        request after `starts` [n] others, and each further one the next tokens."""
        lens = np.ones_like(starts)
        for number in range(max(len(seconds) - NUM_KEPT, 0), len(seconds)):
            self._decodes.append((StepLoad.of_tokens(starts + number, lens), seconds[number]))
        self._largest = max(self._largest, len(starts))
        self._num_since_fit += len(seconds)
        self.since_s = 0.0

    def planned(self, batch: Batch) -> None:
        """Note that this batch is the next step."""
        if self.room is None and not self._bounds.are_any:
            return
        plan = batch.plan
        if plan.drafting is not None:
            # The running requests still wait.
            self.since_s += self.draft_cost.seconds(*size_of(plan, plan.drafting))
            return
        if self.room is not None:
            is_online = ~self._columns.background.take(batch.rows)
            self.room.planned(plan.step, self._online_s(batch, is_online))
            self._count_drafts(batch, is_online)
        has_decodes = plan.layers is None and len(batch.rows) > len(batch.prefills)
        if has_decodes or not self.load_of(self._next_rows()).tokens:
            self.since_s = 0.0
            return
        self._learn()
        if self.cost.is_known:
            self.since_s += self.cost.seconds(StepLoad.of(plan))
        else:
            self.since_s = math.inf
        if plan.ahead is not None:
            self.since_s += plan.ahead.seconds

    def model(self) -> CostModel | None:
        """The cost of steps, perhaps without the last few; None while too little is known."""
        if self._model is None or self._num_since_fit >= self._next_fit:
            self._learn()
            self._num_since_fit = 0
            if self.cost.is_known:
                self._model = self.cost.model()
                step_s = max(self._model.step_s + self._model.token_s, MIN_STEP_S)
                self._next_fit = min(max(REFIT_STEPS, int(REFIT_S / step_s)), MOST_REFIT_STEPS)
        return self._model

    def decode_is_due(self, waiting: Waiting) -> bool:
        """Whether the running requests must have a turn before the next piece of a prompt."""
        budget = self.budget(waiting, mixes=False)
        return budget is not None and budget.limit(0) < self._bounds.min_tokens

    def budget(self, waiting: Waiting, *, mixes: bool) -> StepBudget | None:
        """The part of the next step that prompts may take; None: no limit. `mixes`: the running
        requests are part of that step."""
        self._budget = None
        if self.room is None and not self._bounds.are_any:
            return None
        rows = self._next_rows()
        if waiting.is_background:
            self._budget = self._background_budget(rows, mixes=mixes)
            return self._budget
        background_s = 0.0
        if waiting.beside_background:
            # Background rows join when it is known how much time prompts leave.
            rows = rows[~self._columns.background.take(rows)]
            background_s = self._background_bound_s()
        if not len(rows):
            return None
        slowdown = self._slowdown(rows, waiting)
        if slowdown == math.inf and self._bounds.max_step_s == math.inf:
            return None
        self._learn()
        max_tokens = 2 * self._largest
        min_tokens = 0 if self.since_s else self._bounds.min_tokens
        if self.cost.lacks_decodes:
            # Without this, an endless series of prompts would prevent any step without prompts.
            self._budget = StepBudget(0.0, (1.0, 0.0), max_tokens, min_tokens=0)
            return self._budget
        if not self.cost.is_known:
            left_s = 0.0 if self.since_s else math.inf
            self._budget = StepBudget(left_s, (1.0, 0.0), max_tokens, min_tokens)
            return self._budget
        cost = self.cost.model()
        decode_s = cost.seconds(self.load_of(rows))
        # What background rows may take, prompts of online requests may take as well.
        background_s -= cost.token_s * self._num_drafts
        bound_s = max(slowdown * decode_s, LEAST_BOUND_S, background_s)
        bound_s = min(bound_s, self._longest_s)
        left_s = bound_s - self.since_s - decode_s
        if not mixes:
            # The running requests then have a step of their own after this one.
            left_s -= cost.step_s
        rates = cost.token_s / self._bounds.num_pieces, cost.pair_s / self._bounds.num_pieces
        self._budget = StepBudget(left_s, rates, max_tokens, min_tokens)
        return self._budget

    def _background_budget(self, rows: IntArray, *, mixes: bool) -> StepBudget | None:
        """The part of the next step of `rows` that prompts of background requests may take."""
        self._learn()
        online = rows[~self._columns.background.take(rows)]
        if not self.cost.is_known:
            # With nobody to disturb, the first steps show what steps cost: the first one of all
            # computes prompts, and one of the rows that decode then computes none.
            if not len(online) and not (self.cost.lacks_decodes and len(rows)):
                return None
            return StepBudget(0.0, (1.0, 0.0), 0, min_tokens=0)
        cost = self.cost.model()
        rates = cost.token_s / self._bounds.num_pieces, cost.pair_s / self._bounds.num_pieces
        if not len(online):
            # Rows that nobody waits for have their turn when no prompt is left.
            rows_s = cost.seconds(self.load_of(rows)) if mixes else cost.step_s
            left_s = self._bounds.background_s - rows_s
            return StepBudget(left_s, rates, 2 * self._largest, self._bounds.min_tokens)
        bound_s = self._background_bound_s() - cost.token_s * self._num_drafts
        if self._columns.num_background < self._reserve(bound_s, cost):
            rows = online
        left_s = bound_s - self.since_s - cost.seconds(self.load_of(rows))
        if not mixes and len(rows):
            left_s -= cost.step_s
        return StepBudget(left_s, rates, 2 * self._largest, min_tokens=0)

    def _reserve(self, bound_s: float, cost: CostModel) -> float:
        """How many background rows fill a step of `bound_s` seconds. Until there are as many, their
        prompts go before their rows: rows can fill steps with prompts of online requests, in which
        no prompt of theirs is computed."""
        if cost.token_s <= 0:
            return math.inf
        return (bound_s - cost.step_s) / cost.token_s

    def left_of_online(self, online: IntArray, prompts: Sequence[Request]) -> float:
        """The seconds that background rows may add to a step of the rows `online` and these pieces
        of prompts of online requests."""
        cost = self.model()
        if cost is None:
            return 0.0
        starts = np.array([request.kv_len for request in prompts], dtype=np.int32)
        ends = np.array([request.extend_end for request in prompts], dtype=np.int32)
        pieces = StepLoad.of_tokens(starts, ends - starts)
        load = self.load_of(online)
        load = StepLoad(load.tokens + pieces.tokens, load.pairs + pieces.pairs)
        return self._background_bound_s() - self.since_s - cost.seconds(load)

    def _background_bound_s(self) -> float:
        """How long a step of online requests may take for background requests; 0: as long as it
        takes without them."""
        cost = self.model()
        if cost is None or self.room is None:
            return 0.0
        return min(self.room.bound_s(cost), self._longest_s)

    def _online_s(self, batch: Batch, is_online: BoolArray) -> float:
        """What the tokens of online requests, those of the rows `is_online` [R], take in a step."""
        cost = self.model()
        if cost is None:
            return 0.0
        load = StepLoad.of_tokens(batch.starts[is_online], batch.lens[is_online])
        return cost.token_s * load.tokens + cost.pair_s * load.pairs

    def _count_drafts(self, batch: Batch, is_online: BoolArray) -> None:
        """Prompts leave the drafts of online rows, `is_online` [R], as much time as they took
        last."""
        if not is_online.any():
            return
        self._num_drafts = 0
        if batch.plan.drafts is not None:
            self._num_drafts = int(batch.plan.drafts[is_online].sum())

    def draft_room(self, num_before: int) -> float:
        """How many drafts the next step of the running requests has time for, after `num_before`
        tokens of prompts. Only a bound in milliseconds limits drafts: a draft costs a stream time,
        but gives it tokens."""
        if self._bounds.max_step_s == math.inf or not self.cost.is_known:
            return math.inf
        rows = self._next_rows()
        if not len(rows):
            return math.inf
        if num_before and self._budget is not None:
            left_s = self._budget.left_s
        else:
            left_s = self._left_s(rows)
        cost = self.cost.model()
        longest = int(self._columns.seq_len[rows].max())
        token_s = cost.token_s + cost.pair_s * longest
        return max(left_s, 0.0) / token_s if token_s > 0 else math.inf

    def forced_ends(
        self, rows: IntArray, starts: IntArray, ends: IntArray, num_before: int
    ) -> IntArray:
        """[R] How far the next step of `rows` [R] computes their known tokens, which lie between
        `starts` and `ends` [R], after `num_before` tokens of prompts.

        A grammar may force many tokens at once. They slow down the rows that have one token each as
        prompts may, and the rest of them is computed in the steps after this one. A rest has at
        least two tokens, for a single one would be taken for the token that was sampled last.
        """
        columns = self._columns
        lens = ends - starts
        is_forced = (lens > 1) & (columns.known_len.take(rows) == ends)
        is_other = (lens == 1) & ~columns.background.take(rows)
        if not is_forced.any() or not is_other.any() or not self.cost.is_known:
            return ends
        cost = self.cost.model()
        own_s = cost.seconds(StepLoad(len(rows), int(ends.sum())))
        bound_s = math.inf
        if self._bounds.max_slowdown > 0:
            bound_s = max(self._bounds.max_slowdown * own_s, LEAST_BOUND_S)
        bound_s = min(bound_s, self._longest_s)
        token_s = cost.token_s + cost.pair_s * int(ends.max())
        if bound_s == math.inf or token_s <= 0:
            return ends
        room = max((bound_s - self.since_s - own_s) / token_s - num_before, 0.0)
        most = 1 + int(room / np.count_nonzero(is_forced))
        is_cut = is_forced & (lens > most + 1)
        return np.where(is_cut, starts + most, ends).astype(np.int32)

    def drafting_room(self, num_passes: int) -> float:
        """How many tokens a step of the draft model has time for, before the next step of the
        running requests."""
        if self._bounds.max_step_s == math.inf or not self.cost.is_known:
            return math.inf
        rows = self._next_rows()
        if not len(rows):
            return math.inf
        left_s = self._left_s(rows) - self.draft_cost.seconds(0, num_passes)
        token_s = self.draft_cost.token_s
        if token_s <= 0:
            return math.inf if left_s > 0 else 0.0
        return max(left_s, 0.0) / token_s

    def layers_in_time(self, load: StepLoad, waiting: Waiting) -> float:
        """How many layers of a prefill with this total load fit before the next step of the running
        requests."""
        of_pass = self._budget
        budget = self.budget(waiting, mixes=False)
        self._budget = of_pass
        if budget is None:
            return math.inf
        return budget.layers(load)

    def takes_layers(self, load: StepLoad, num_layers: int) -> None:
        """Note that `num_layers` layers are computed of the prefill that the last pass chose;
        `load` is its total load."""
        if self._budget is not None:
            self._budget.spend_layers(load, num_layers)

    @property
    def _longest_s(self) -> float:
        """The longest expected time of a step, so that nine of ten steps keep to the bound."""
        return self._bounds.max_step_s / self._margin.factor

    def _left_s(self, rows: IntArray) -> float:
        """The time left of the bound beside the next step of `rows`, which wait for it."""
        return self._longest_s - self.since_s - self.cost.seconds(self.load_of(rows))

    def _slowdown(self, rows: IntArray, waiting: Waiting) -> float:
        """How many times as long the next step of `rows` may take because of the prompts.

        It increases with the number of waiting requests per running request that was there before
        them.
        """
        if self._bounds.max_slowdown <= 0:
            return math.inf
        came_before = self._columns.num_arrived[rows] <= waiting.num_before
        came_before &= ~self._columns.background.take(rows)
        num_before = int(np.count_nonzero(came_before))
        if not num_before:
            return math.inf
        pressure = max(waiting.num / num_before, 1.0)
        return 1 + (self._bounds.max_slowdown - 1) * pressure

    def _learn(self) -> None:
        """Learn from the stored decode steps."""
        for work, seconds in self._decodes:
            load = work if isinstance(work, StepLoad) else StepLoad.of(work)
            self.cost.observe(load, seconds, has_prefill=False)
        self._decodes.clear()

    def _next_rows(self) -> IntArray:
        """The rows that wait for their next token."""
        return self._columns.unfinished(self._running.rows)

    def load_of(self, rows: IntArray) -> StepLoad:
        """The load of a step of `rows` alone."""
        columns = self._columns
        seq_len = columns.seq_len[rows]
        # With overlap, drafts that are not compared yet are computed again.
        lens = seq_len - np.minimum(columns.kv_len[rows], columns.known_len[rows])
        pairs = lens * seq_len
        return StepLoad(int(lens.sum()), int(pairs.sum()))
