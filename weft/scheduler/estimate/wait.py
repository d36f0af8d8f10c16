"""When a waiting request will have its first token, from what steps have cost so far.

The queue is played through in its order, with the measured cost of a step (`pace/step_cost.py`):
each request takes a row and memory as soon as there are some, its prompt takes its time, running
requests have a step between two pieces of it, and end when they have generated what is expected of
them. It changes nothing and reads no clock. Whether it is right is learnt elsewhere (`band.py`).
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from weft.scheduler.batch import RunningBatch
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings

MAX_PLAYED = 2_000  # requests; those behind them are taken to go as fast
FIRST_SHARE = 0.5  # of its limit that a request is expected to generate, before any has ended
SHARE_WEIGHT = 0.05  # of the latest request that has ended


class WaitEstimator:
    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        kv: KvMemory,
        queue: WaitingQueue,
        running: RunningBatch,
        pace: Pace,
    ) -> None:
        self._settings = settings
        self._kv = kv
        self._queue = queue
        self._running = running
        self._pace = pace
        self._share = FIRST_SHARE

    def ended(
        self,
        num_generated: int,
        max_new: int,
    ) -> None:
        """A request has generated so many of the tokens that it allowed."""
        if max_new > 0:
            share = num_generated / max_new
            self._share += SHARE_WEIGHT * (share - self._share)

    def first_token_s(
        self,
        request: Request,
        now: float,
        open_prompts: list[Request],
    ) -> float | None:
        """Seconds from now until a waiting request has its first token.

        `open_prompts` are computed in part. None: nobody knows yet what steps cost.
        """
        cost = self._pace.model()
        if cost is None:
            return None
        play = Play(self._settings, self._kv, self._running, cost, self._share)
        for prompt in open_prompts:
            play.compute(prompt.remaining_prefill, prompt.kv_len)
        num_played = 0
        for other in self._queue.order(now):
            num_played += 1
            play.admit(other)
            if other is request:
                return play.now_s
            if num_played == MAX_PLAYED:
                break
        if not num_played:
            return None
        return play.now_s * len(self._queue) / num_played


class Play:
    """Virtual time, rows and memory."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KvMemory,
        running: RunningBatch,
        cost: CostModel,
        share: float,
    ) -> None:
        self.now_s = 0.0
        self._cost = cost
        self._share = share
        self._chunk_len = settings.max_step_tokens
        self._slowdown = settings.max_slowdown
        self._num_steps = 0.0  # of running requests since the beginning
        self._free_rows = kv.rows.num_free
        self._free_tokens = kv.available
        self._context = 0  # tokens to which the running ones attend
        # Of the running ones: the step with which it ends, and its tokens.
        self._ends: list[tuple[float, int]] = []
        columns = kv.columns
        rows = running.rows
        lengths = columns.seq_len[rows]
        num_generated = lengths - columns.prompt_len[rows]
        max_new = columns.max_len[rows] - columns.prompt_len[rows]
        left = np.maximum(columns.max_len[rows] - lengths, 1)
        # One that ignores EOS goes to its end.
        shares = np.where(columns.stops_at_eos[rows], share, 1.0)
        expected = shares * max_new - num_generated
        # One that has generated more than was expected of it is half way through the rest.
        expected = np.where(expected >= 1, expected, left / 2)
        for length, steps in zip(lengths.tolist(), expected.tolist(), strict=True):
            self._begin(length, steps)

    def admit(self, request: Request) -> None:
        """Wait for a row and memory; then compute the prompt."""
        num_new = request.max_len - request.spec.prompt_len
        share = self._share
        if request.message.sampling.ignore_eos:
            share = 1.0
        expected = max(share * num_new, 1.0)
        needed = request.remaining_prefill + expected
        while self._ends and (self._free_rows < 1 or self._free_tokens < needed):
            self._wait_for_end()
        cached_len = self._kv_of(request)
        self.compute(request.fill_len - cached_len, cached_len)
        self._free_rows -= 1
        self._free_tokens -= math.ceil(needed)
        if num_new:
            self._begin(request.fill_len, expected)
        else:
            self._free_rows += 1
            self._free_tokens += math.ceil(needed)

    def compute(
        self,
        num_tokens: int,
        num_before: int,
    ) -> None:
        """Compute tokens of a prompt, with steps of the running requests between its pieces."""
        pairs = num_tokens * (num_before + num_tokens // 2)
        work_s = self._cost.token_s * num_tokens + self._cost.pair_s * pairs
        num_pieces = max(math.ceil(num_tokens / self._chunk_len), 1)
        if not self._ends:
            self.now_s += work_s + num_pieces * self._cost.step_s
            return
        step_s = self._step_s()
        pieces = float(num_pieces)
        if self._slowdown > 1:
            pieces = max(pieces, work_s / ((self._slowdown - 1) * step_s))
        self.now_s += work_s + pieces * step_s
        self._num_steps += pieces
        self._end_due()

    @staticmethod
    def _kv_of(request: Request) -> int:
        """Tokens of it that need not be computed, as far as that is known."""
        return max(request.prefix.length, request.kv_len)

    def _begin(
        self,
        num_tokens: int,
        num_steps: float,
    ) -> None:
        heapq.heappush(self._ends, (self._num_steps + num_steps, num_tokens))
        self._context += num_tokens

    def _wait_for_end(self) -> None:
        """Let the running requests decode until the first of them ends."""
        steps = max(self._ends[0][0] - self._num_steps, 0.0)
        self.now_s += steps * self._step_s()
        self._num_steps += steps
        self._end_due()

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, num_tokens = heapq.heappop(self._ends)
            self._free_rows += 1
            self._free_tokens += num_tokens
            self._context -= num_tokens

    def _step_s(self) -> float:
        """What a step takes in which the running requests decode."""
        load = StepLoad(tokens=len(self._ends), pairs=self._context)
        return self._cost.seconds(load)
