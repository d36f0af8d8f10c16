"""Admission of requests with a known length: the completions of the running ones are simulated.

A request that ignores EOS ends by its length, so it is known when its memory comes back. Such a
request needs no memory for all outputs at once. It needs enough memory until each completion, and
what ended before has given back all that it had:

    free + freed by those that ended before - tokens until this end * requests that still run

must be larger than a page for each of the requests that still run: their last pages may be begun
and not full, and memory comes back a step after the end. (SGLang: add_one_req_ignore_eos.)

All requests advance by one token in each decode step, so the order of the completions is sure.
Requests whose end or whose speed is not known count with all their memory, and nobody waits for
their end. This module knows no queue and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import num_pages_for
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request
from weft.scheduler.settings import CLIP_MAX_NEW_TOKENS, SchedulerSettings


class TightestMoment(NamedTuple):
    """The tightest moment of a simulation: just before some completion."""

    # tokens that prompts of this step, and the requests that still run, will have taken
    needed: int
    available: int  # tokens that are free, or that earlier completions have freed

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def has_known_length(request: Request) -> bool:
    """Whether a request ends by its length at the latest, and gets one token in each step."""
    sampling = request.message.sampling
    # The tokens that a grammar forces may all come in one step.
    return sampling.ignore_eos and sampling.grammar is None


def can_simulate(settings: SchedulerSettings) -> bool:
    """Whether all requests advance together. (Besides, a completion must free all memory of its
    request: nothing is simulated with a prefix cache.)"""
    if settings.draft_sources or settings.split_prefill_layers:
        return False
    return settings.num_stages == 1


class CompletionBudget:
    """The memory of the KV pool in one pass. Layers with memory of their own have their budgets.

    `rows` are those of running requests; `ratio`: the part of their output that those that stop at
    EOS are expected to generate. `open_prompts`: requests whose prompts are computed in part. They
    may stay open for any number of steps, so they count with all their memory.
    """

    def __init__(
        self, kv: KvMemory, rows: IntArray, ratio: float, open_prompts: Sequence[Request]
    ) -> None:
        self._kv = kv
        self._page_size = kv.page_size
        self._promised = 0.0  # tokens for requests without a known end
        self._open = {request.id: self._rest_of(request) for request in open_prompts}
        self._taken = 0  # tokens of memory that this step takes for prompts
        self._left: list[int] = []  # of each request with a known end: tokens until then
        self._freed: list[int] = []  # tokens that its end frees, without those until then
        columns = kv.columns
        for row in rows.tolist():
            left = max(int(columns.max_len[row] - columns.seq_len[row]), 0)
            if has_known_length(columns.requests[row]):
                self._left.append(left)
                self._freed.append(self._pages_of(int(columns.kv_len[row])))
                continue
            expected = min(left, CLIP_MAX_NEW_TOKENS)
            self._promised += expected * ratio if columns.stops_at_eos[row] else expected
            self._promised += self._page_size

    def tightest(self, request: Request, extend: int, *, is_unsplit: bool) -> TightestMoment:
        """Simulate all completions with one more request, of whose prompt `extend` tokens are to be
        computed. `is_unsplit`: in this step."""
        left = list(self._left)
        freed = list(self._freed)
        # One token is left over: what runs must be able to go on.
        kept = self._pages_of(extend) + math.ceil(self._promised) + 1
        kept += sum(self._open.values())
        output = request.max_len - request.fill_len
        if is_unsplit:
            left.append(output)
            freed.append(self._pages_of(request.fill_len))
        else:
            kept += output + self._page_size
        free = self._kv.room.rest - self._taken
        if not left:
            return TightestMoment(kept, free)
        order = np.argsort(left, kind="stable")
        num_running = np.arange(len(order), 0, -1)
        freed_in_order = np.array(freed)[order]
        needed = kept + (np.array(left)[order] + self._page_size) * num_running
        available = free + np.cumsum(freed_in_order) - freed_in_order
        tightest = int(np.argmax(needed - available))
        return TightestMoment(int(needed[tightest]), int(available[tightest]))

    def take(self, request: Request, extend: int, reserve: int) -> None:
        """The step computes this piece of a prompt. `reserve`: tokens that the request is expected
        to generate."""
        self._open.pop(request.id, None)
        charged = self._pages_of(extend)
        self._taken += charged
        if extend < request.remaining_prefill:
            self._open[request.id] = self._rest_of(request) - charged
        elif has_known_length(request):
            self._left.append(request.max_len - request.fill_len)
            self._freed.append(self._pages_of(request.fill_len))
        else:
            self._promised += reserve + self._page_size

    def _rest_of(self, request: Request) -> int:
        """Tokens of memory that a request with an open prompt may still take."""
        return self._pages_of(request.max_len - request.kv_len) + self._page_size

    def _pages_of(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self._page_size) * self._page_size
