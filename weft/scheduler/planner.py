"""Turns the chosen requests into arrays: which tokens run, where K and V go, and how the next token
is sampled.

The planner decides nothing: the scheduler has chosen which requests run, and how far, and the pace
says how many forced tokens a step has time for. The hooks of optional features add their operations
to a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, consecutive
from weft.plan.step import LAST_SAMPLED, ForwardMode, LayerSpan, Plan, Result, Sampling
from weft.scheduler.batch import NO_ROWS, Batch
from weft.scheduler.feature import FeatureHooks, StepInputs
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import Pace
from weft.scheduler.request import Request


class StepTokens(NamedTuple):
    """The tokens of one step: R requests, T tokens."""

    rows: IntArray  # [R]
    starts: IntArray  # [R]
    lens: IntArray  # [R]
    tokens: IntArray  # [T]
    slots: IntArray  # [T]
    samples: BoolArray  # [R]
    drafts: IntArray | None = None  # [R] how many of the last tokens are drafts
    unsettled: IntArray | None = None  # [R] drafts of the previous step that are not compared yet


def prepare_for_extend(kv: KvMemory, requests: Sequence[Request]) -> StepTokens:
    """Allocate and list the next piece (up to `extend_end`) of each request's prompt."""
    columns = kv.columns
    rows: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    samples: list[bool] = []
    slots: list[IntArray] = []
    tokens: list[IntArray] = []
    for request in requests:
        row = request.row
        start = request.kv_len
        taken = kv.extend(request)
        if kv.copies is not None:
            num_copied = kv.copies.begin(row, start, taken)
            start += num_copied
            taken = taken[num_copied:]
        rows.append(row)
        starts.append(start)
        lens.append(len(taken))
        # A middle chunk samples no token, and neither does a request for the prompt alone.
        samples.append(request.wants_tokens and request.completes)
        slots.append(taken)
        tokens.append(columns.tokens[row, start : request.extend_end])
    step = StepTokens(
        rows=np.array(rows, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        lens=np.array(lens, dtype=np.int32),
        tokens=np.concatenate(tokens),
        slots=np.concatenate(slots),
        samples=np.array(samples, dtype=np.bool_),
    )
    for request in requests:
        request.kv_len = request.extend_end
        columns.kv_len[request.row] = request.kv_len
        if request.is_prefilled:
            # Includes the token that this step samples.
            columns.seq_len[request.row] = request.fill_len + 1
    return step


def prepare_for_decode(kv: KvMemory, rows: IntArray, pace: Pace, num_before: int) -> StepTokens:
    """Allocate and list the pending tokens of each decoding row, after `num_before` tokens of
    prompts.

    Usually this is one token, which only the device knows. A row that was given forced tokens has
    more, and their ids are known; it samples after the last of them, perhaps in a later step:

        kv_len   seq_len             kv_len            seq_len
        | last ... |                 | sampled, forced ... |
          LAST_SAMPLED                 ids from the columns
    """
    columns = kv.columns
    at = rows.astype(np.intp)  # numpy would convert the rows for each column
    starts = columns.kv_len.take(at)
    ends = columns.seq_len.take(at)
    lens: IntArray = ends - starts
    seq_lens: IntArray = ends + 1  # with the token that this step samples
    samples = np.ones(len(rows), dtype=np.bool_)
    # The usual case has its own branch, because it needs no search for the tokens of each row.
    if np.count_nonzero(lens == 1) == len(rows):
        row_of_token = rows
        positions = starts
        tokens = np.full(len(rows), LAST_SAMPLED, dtype=np.int32)
    else:
        is_known = lens > 1
        known_ends = ends
        ends = pace.forced_ends(rows, starts, known_ends, num_before)
        lens = ends - starts
        samples = ends == known_ends
        seq_lens = np.where(samples, seq_lens, known_ends)
        row_of_token = np.repeat(rows, lens)
        positions = consecutive(starts, lens)
        known = columns.tokens[row_of_token, positions]
        tokens = np.where(np.repeat(is_known, lens), known, np.int32(LAST_SAMPLED))
    slots = kv.extend_running(row_of_token, positions)
    columns.kv_len[at] = ends
    columns.seq_len[at] = seq_lens
    return StepTokens(rows, starts, lens, tokens, slots, samples)


def mix_with_running(extend: StepTokens, decode: StepTokens) -> StepTokens:
    """One step with both: prefills first, then the decoding rows."""

    def after_prompts(numbers: IntArray | None) -> IntArray | None:
        if numbers is None:
            return None
        return np.concatenate([np.zeros_like(extend.rows), numbers])

    return StepTokens(
        rows=np.concatenate([extend.rows, decode.rows]),
        starts=np.concatenate([extend.starts, decode.starts]),
        lens=np.concatenate([extend.lens, decode.lens]),
        tokens=np.concatenate([extend.tokens, decode.tokens]),
        slots=np.concatenate([extend.slots, decode.slots]),
        samples=np.concatenate([extend.samples, decode.samples]),
        drafts=after_prompts(decode.drafts),
        unsettled=after_prompts(decode.unsettled),
    )


class Planner:
    """Makes batches with their plans. Numbers the steps."""

    def __init__(self, kv: KvMemory, hooks: FeatureHooks, pace: Pace) -> None:
        self._kv = kv
        self._columns = kv.columns
        self._hooks = hooks
        self._pace = pace
        self.num_steps = 0

    def make_batch(self, prefills: list[Request], decode_rows: IntArray = NO_ROWS) -> Batch:
        """The next step: prefills, decoding rows, or both."""
        if prefills:
            mode = ForwardMode.EXTEND
            work = prepare_for_extend(self._kv, prefills)
            if len(decode_rows):
                mode = ForwardMode.MIXED
                decode = self._list_decode(decode_rows, len(work.tokens))
                work = mix_with_running(work, decode)
        else:
            mode = ForwardMode.DECODE
            work = self._list_decode(decode_rows, 0)
            if len(work.tokens) > len(work.rows):
                mode = ForwardMode.MIXED  # with forced tokens, or drafts
        batch = self._batch(mode, prefills, work)
        self._add_plan(batch, work, self._hooks.prepare(batch, self._columns))
        return batch

    def row_released(self, request: Request) -> None:
        """A request is about to release its row."""

    def settle(self, batch: Batch, result: Result, is_eos: BoolArray) -> Result | None:
        """Decide how much of the result of a batch counts. Called before the result is processed;
        returns the part that counts, or None if no request gets a token from such a batch.

        `is_eos` [vocab_size] marks the model's end-of-sequence tokens.
        """
        return result

    # Inside

    def _add_plan(
        self, batch: Batch, work: StepTokens, step: StepInputs, layers: LayerSpan | None = None
    ) -> None:
        """Give a batch its plan for the next step, with the operations of features."""
        batch.blocks_overlap |= step.blocks_overlap
        table = None
        if self._kv.rows.writes:
            table = self._kv.take_writes()
        plan = Plan(
            step=self.num_steps,
            mode=batch.mode,
            rows=work.rows,
            starts=work.starts,
            lens=work.lens,
            tokens=work.tokens,
            slots=work.slots,
            samples=work.samples,
            sampling=Sampling(*batch.facts.sampling, batch.sample_lens),
            table=table,
            inputs=tuple(step.inputs),
            logits=tuple(step.logits),
            outputs=tuple(step.outputs),
            drafts=work.drafts,
            unsettled=work.unsettled,
            layers=layers,
            adapters=step.adapters,
            rotation=step.rotation,
            sees_to=step.sees_to,
            ahead=step.ahead,
        )
        if self._kv.copies is not None:
            copies = self._kv.copies.take()
            if copies is not None:
                plan = replace(plan, copies=copies)
        if self._kv.groups:
            plan = self._kv.with_groups(plan)
        batch.plan = plan
        self.num_steps += 1

    def _list_decode(self, rows: IntArray, num_before: int) -> StepTokens:
        """The tokens that `rows` compute in a step that has `num_before` tokens of prompts."""
        return prepare_for_decode(self._kv, rows, self._pace, num_before)

    def _batch(self, mode: ForwardMode, prefills: list[Request], work: StepTokens) -> Batch:
        return Batch(mode, prefills, work.rows, work.starts, work.lens, work.samples, self._columns)
