"""Simulates the next steps of the engine in virtual time, with the measured cost of steps.

Prompts take rows and memory in order, as soon as these are free. They share a step as far as it has
tokens, and time beside the running requests, as in `pace/pace.py`. Running requests decode in that
step or in one of their own, and end when they have generated the expected tokens (`seen.py`).
This module knows no policy and no queue.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from weft.scheduler.estimate.seen import OutputsSeen
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import LEAST_BOUND_S, MIN_TOKENS, StepBudget
from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings


class PlayedPrompt:
    """The rest of a prompt to compute, of a request that has `kv_len` tokens in the cache.

    `is_wanted`: the caller asks for its time. A first token later than `latest_s` means that the
    request is refused, so it takes no time of other requests.
    """

    __slots__ = ("expected", "has_row", "is_wanted", "kv_len", "latest_s", "left", "request")

    def __init__(
        self,
        request: Request,
        kv_len: int,
        *,
        has_row: bool = False,
        is_wanted: bool = False,
        latest_s: float = math.inf,
    ) -> None:
        self.request = request
        self.kv_len = kv_len
        self.left = max(request.fill_len - kv_len, 1)
        self.expected = 0.0  # tokens that it will generate, once they have been estimated
        self.has_row = has_row
        self.is_wanted = is_wanted
        self.latest_s = latest_s


class PlayedRunning:
    """The running requests, and the rows and the memory that are free beside them."""

    def __init__(self, kv: KvMemory) -> None:
        self.num_steps = 0.0  # decode steps since the beginning
        self.free_rows = kv.rows.num_free
        self.free_tokens = float(kv.room.available)
        self.context = 0  # tokens to which they attend
        # Of each request: the step with which it ends, its tokens, and the memory that it frees.
        self._ends: list[tuple[float, int, float]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, num_tokens: int, num_steps: float, memory: float) -> None:
        """A request of `num_tokens` tokens decodes for `num_steps` steps."""
        heapq.heappush(self._ends, (self.num_steps + num_steps, num_tokens, memory))
        self.context += num_tokens

    def have_room(self, memory: float) -> bool:
        """Whether a row and this many tokens of memory are free. A prompt may use all memory if
        nothing runs."""
        return self.free_rows > 0 and (self.free_tokens >= memory or not self._ends)

    def take(self, memory: float) -> None:
        self.free_rows -= 1
        self.free_tokens -= memory

    def give_back(self, memory: float) -> None:
        self.free_rows += 1
        self.free_tokens += memory

    @property
    def steps_to_end(self) -> float:
        """Decode steps until the first of them ends."""
        return max(self._ends[0][0] - self.num_steps, 1.0)

    def end_due(self) -> None:
        """Free what the requests had that have ended by now."""
        while self._ends and self._ends[0][0] <= self.num_steps:
            _, num_tokens, memory = heapq.heappop(self._ends)
            self.give_back(memory)
            self.context -= num_tokens


class Play:
    """The simulated state: time, rows and memory. `now_s` is 0 at the beginning."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KvMemory,
        cost: CostModel,
        outputs: OutputsSeen,
    ) -> None:
        self.now_s = 0.0
        self.num_admitted = 0
        self._cost = cost
        self._outputs = outputs
        self._columns = kv.columns
        self._mixes = settings.mixed_chunk and settings.piece_len is not None
        self._step_tokens = settings.max_step_tokens
        self._slowdown = settings.max_slowdown
        self._longest_s = settings.max_step_s or math.inf
        self._min_tokens = max(MIN_TOKENS, settings.page_size)
        self._running = PlayedRunning(kv)
        self._num_waiting = 0
        # Of each request that runs at the beginning: requests that had arrived when it began to
        # decode.
        self._arrived: list[int] = []

    def begin(
        self,
        open_prompts: list[Request],
        *,
        num_waiting: int,
    ) -> None:
        """Take over the running requests, including those whose prompts have just been computed,
        but without open prompts."""
        columns = self._columns
        taken = columns.max_len > 0
        for prompt in open_prompts:
            taken[prompt.row] = False
        rows = np.flatnonzero(taken)
        lengths = columns.seq_len[rows]
        prompt_len = columns.prompt_len[rows]
        for length, generated, limit, stops in zip(
            lengths.tolist(),
            (lengths - prompt_len).tolist(),
            (columns.max_len[rows] - prompt_len).tolist(),
            columns.stops_at_eos[rows].tolist(),
            strict=True,
        ):
            left = self._outputs.left(generated, limit, stops=stops)
            self._running.free_tokens -= left
            self._running.add(length, left, length + left)
        self._arrived = sorted(columns.num_arrived[rows].tolist())
        self._num_waiting = num_waiting

    def first_tokens(self, prompts: Iterator[PlayedPrompt], num_wanted: int) -> dict[int, float]:
        """Simulate until all wanted prompts, or all prompts, have their first tokens. Returns the
        times of the wanted prompts among them, by the ids of their requests."""
        times: dict[int, float] = {}
        prompt = next(prompts, None)
        while prompt is not None and len(times) < num_wanted:
            budget = self._budget(prompt.request)
            room = self._room()
            num_tokens = 0
            work_s = 0.0
            ready: list[int] = []  # of the wanted ones
            while prompt is not None:
                if self._is_late(prompt, work_s):
                    times[prompt.request.id] = self._earliest_s(prompt, work_s)
                    prompt = next(prompts, None)
                    continue
                if not self._has_room(prompt):
                    break
                piece = min(budget.limit(prompt.kv_len), room - num_tokens, prompt.left)
                if piece <= 0:
                    break
                work_s += self._work_s(piece, prompt.kv_len)
                budget.spend(prompt.kv_len, piece)
                num_tokens += piece
                prompt.kv_len += piece
                prompt.left -= piece
                if prompt.left:
                    break
                if prompt.is_wanted:
                    ready.append(prompt.request.id)
                self._join(prompt)
                prompt = next(prompts, None)
            if num_tokens:
                at_s = self._end_turn(work_s)
                times.update(dict.fromkeys(ready, at_s))
            elif self._running and prompt is not None:
                self._wait_for_end()
            else:
                # The prompt will never fit, as far as known here; the check is made at arrival.
                return times
        return times

    def _is_late(self, prompt: PlayedPrompt, work_s: float) -> bool:
        """Whether a prompt that has not begun is late if the next step computes it after other
        prompts that take `work_s`."""
        if prompt.latest_s == math.inf or prompt.has_row:
            return False
        return self._earliest_s(prompt, work_s) > prompt.latest_s

    def _earliest_s(self, prompt: PlayedPrompt, work_s: float) -> float:
        own_s = self._work_s(prompt.left, prompt.kv_len)
        return self.now_s + self._cost.step_s + work_s + own_s

    # A step with prompts

    def _room(self) -> int:
        """Number of prompt tokens that fit into the next step."""
        if not self._mixes:
            return self._step_tokens
        return max(self._step_tokens - len(self._running), self._min_tokens)

    def _budget(self, first: Request) -> StepBudget:
        """The time of the next step for prompts, of which `first` is the first."""
        rates = (self._cost.token_s, self._cost.pair_s)
        if not self._running:
            return StepBudget(math.inf, (0.0, 0.0), self._step_tokens, self._step_tokens)
        decode_s = self._decode_s()
        bound_s = max(self._slowdown_beside(first) * decode_s, LEAST_BOUND_S)
        left_s = min(bound_s, self._longest_s) - decode_s
        if not self._mixes:
            left_s -= self._cost.step_s
        if left_s == math.inf:
            return StepBudget(math.inf, (0.0, 0.0), self._step_tokens, self._step_tokens)
        return StepBudget(left_s, rates, self._step_tokens, self._min_tokens)

    def _slowdown_beside(self, first: Request) -> float:
        """How many times as long as a decode step of the running requests the next step may
        take."""
        if self._slowdown <= 0:
            return math.inf
        came_before = bisect_right(self._arrived, first.spec.num_before)
        num_before = min(came_before, len(self._running))
        if not num_before:
            return math.inf
        return 1 + (self._slowdown - 1) * max(self._num_waiting / num_before, 1.0)

    def _end_turn(self, work_s: float) -> float:
        """End a step with prompts, and the decode step beside it or after it. Returns the time at
        which the prompts have their first tokens."""
        if self._mixes and self._running:
            self.now_s += work_s + self._decode_s()
            self._running.num_steps += 1
            at_s = self.now_s
        else:
            self.now_s += work_s + self._cost.step_s
            at_s = self.now_s
            is_bound = self._slowdown > 0 or self._longest_s < math.inf
            if self._running and is_bound:
                self.now_s += self._decode_s()
                self._running.num_steps += 1
        self._running.end_due()
        return at_s

    def _work_s(
        self,
        num_tokens: int,
        num_before: int,
    ) -> float:
        pairs = num_tokens * (num_before + num_tokens / 2)
        return self._cost.token_s * num_tokens + self._cost.pair_s * pairs

    # Requests come and go

    def _has_room(self, prompt: PlayedPrompt) -> bool:
        """Whether the prompt has a row and memory; takes them if they are free."""
        if prompt.has_row:
            return True
        if not prompt.expected:
            prompt.expected = self._expected(prompt.request)
        needed = prompt.left + prompt.expected
        if not self._running.have_room(needed):
            return False
        prompt.has_row = True
        self._running.take(needed)
        self._num_waiting -= 1
        self.num_admitted += 1
        return True

    def _join(self, prompt: PlayedPrompt) -> None:
        """Let a request whose prompt is computed begin to decode."""
        request = prompt.request
        expected = prompt.expected or self._expected(request)
        if request.wants_tokens:
            self._running.add(request.fill_len, expected, request.fill_len + expected)
        else:
            self._running.give_back(request.fill_len)

    def _expected(self, request: Request) -> float:
        """Tokens that the request is expected to generate."""
        if not request.wants_tokens:
            return 0.0
        num_generated = request.fill_len - request.spec.prompt_len  # before a retraction
        limit = request.max_len - request.spec.prompt_len
        stops = not request.message.sampling.ignore_eos
        return self._outputs.left(num_generated, limit, stops=stops)

    def _wait_for_end(self) -> None:
        """Let the running requests decode until the first of them ends."""
        steps = self._running.steps_to_end
        self.now_s += steps * self._decode_s()
        self._running.num_steps += steps
        self._running.end_due()

    def _decode_s(self) -> float:
        """Seconds of a decode step of the running requests."""
        load = StepLoad(tokens=len(self._running), pairs=self._running.context)
        return self._cost.seconds(load)
