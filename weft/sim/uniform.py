"""Decode steps in which each running request gets a token, up to the one in which some of them end:
many of them at once, with exactly the state that they would have left one by one. Only simulations
use it, because only they know the tokens ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.scheduler.batch import End, stopped
from weft.scheduler.planner import Planner
from weft.scheduler.request import RowFacts
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.times import StepNote


class UniformRows(NamedTuple):
    """The rows of the steps ahead, and how many such steps there can be."""

    rows: IntArray  # [n]
    facts: RowFacts
    known_len: IntArray  # [n] tokens of each request
    num_steps: int


class RanStep(NamedTuple):
    began_s: float
    ended_s: float
    seconds: float  # that the device worked


class UniformDecodes:
    """The steps ahead of one scheduler, between two of its steps, none of them in flight."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        settings = scheduler.settings
        # Where steps are bounded in time, drafted, or have memory of several kinds, each step
        # depends on the one before.
        self._is_plain = (
            type(scheduler.planner) is Planner
            and not settings.max_step_s
            and not settings.draft_sources
            and not settings.split_prefill_layers
            and not scheduler.kv.groups
        )

    def ahead(self) -> UniformRows | None:
        """The steps that can be made at once; None if the next one is not of this kind."""
        scheduler = self._scheduler
        if scheduler.kv.columns.turns:
            return None  # rows take turns: of stages, or of background requests once one has come
        queue = scheduler.waiting_queue
        pace = scheduler.pace
        if (
            not self._is_plain
            or queue.next_line is not None
            or queue.classes is not None
            or scheduler.prefills.chunked_req is not None
            or scheduler.hooks.num_requests
            or not scheduler.outbox.is_empty
            or pace.since_s
        ):
            return None
        scheduler.merge_last_batch()
        columns = scheduler.kv.columns
        rows = scheduler.running_batch.rows
        if not len(rows) or columns.unfinished(rows) is not rows:
            return None
        facts = columns.facts(rows)
        known_len = columns.known_len.take(facts.at)
        if (columns.seq_len.take(facts.at) != known_len).any():
            return None
        if facts.has_stop_ids.any():
            return None
        # The step in which a request ends is the last of them.
        left = columns.max_len.take(facts.at) - known_len
        num_steps = int(left.min())
        num_steps = self._with_memory(known_len, num_steps)
        return UniformRows(rows, facts, known_len, num_steps)

    def _with_memory(self, known_len: IntArray, num_steps: int) -> int:
        """As many of the steps as surely have memory, perhaps of cached pages: no request loses its
        own."""
        kv = self._scheduler.kv
        # A row may begin a page at once.
        num_pages = kv.room.available // kv.page_size - len(known_len)
        most = max(num_pages, 0) * kv.page_size // len(known_len)
        return min(num_steps, most)

    def make(self, ahead: UniformRows, steps: Sequence[RanStep]) -> None:
        """Make steps that ran at these times. `finish` must follow."""
        scheduler = self._scheduler
        page_size = scheduler.kv.page_size
        first = scheduler.planner.num_steps
        at = ahead.facts.at
        num_rows = len(at)
        # A row needs a page in the steps in which its next token begins one.
        phase = (ahead.known_len - 1) % page_size
        for number, ran in enumerate(steps):
            begins = (phase + number) % page_size == 0
            if begins.any():
                self._extend(ahead, number, begins)
            scheduler.prefills.new_token_ratio.decay()
            scheduler.history.begin_walk()
            note = StepNote(first + number, ran.began_s, ran.ended_s, 0, num_rows)
            scheduler.history.decoded(note, at)

    def _extend(self, ahead: UniformRows, number: int, begins: LongArray) -> None:
        """Take a page for each row whose token in this step begins one."""
        kv = self._scheduler.kv
        rows = ahead.rows[begins]
        pages = kv.alloc(len(rows), kv.columns.ids[rows], "decode")
        positions = ahead.known_len[begins] - 1 + number
        page = positions // kv.page_size
        kv.rows.pages[rows, page] = pages

    def finish(self, ahead: UniformRows, tokens: IntArray, steps: Sequence[RanStep]) -> None:
        """The rows have got `tokens` [steps, n] in these steps, of which there is at least one. The
        requests that got their last one end."""
        scheduler = self._scheduler
        columns = scheduler.kv.columns
        at = ahead.facts.at
        num_steps = len(steps)
        numbers = np.arange(num_steps)
        positions = ahead.known_len[None, :] + numbers[:, None]
        columns.tokens[at[None, :], positions] = tokens
        for column in (columns.known_len, columns.kv_len, columns.seq_len):
            column[at] += num_steps
        scheduler.prefills.seen.clear()
        scheduler.planner.num_steps += num_steps
        scheduler.counters.steps.num_all += num_steps
        scheduler.counters.num_generated_tokens += num_steps * len(at)
        # A step computes the token before the one that it samples.
        seconds = [step.ended_s - step.began_s for step in steps]
        scheduler.pace.decoded(ahead.known_len - 1, seconds)
        scheduler.now = steps[-1].ended_s
        self._end(ahead.facts, tokens[-1])

    def _end(self, facts: RowFacts, tokens: IntArray) -> None:
        """End the requests whose last `tokens` [n] have come."""
        scheduler = self._scheduler
        columns = scheduler.kv.columns
        stops = stopped(columns, facts, tokens, scheduler.limits.is_eos)
        is_full = columns.known_len.take(facts.at) >= facts.max_len
        for i in np.flatnonzero(stops | is_full).tolist():
            end = End(int(facts.rows[i]), "length")
            if stops[i]:
                end = End(end.row, "stop", int(tokens[i]))
            scheduler.outbox.attempt(scheduler.end, end)
