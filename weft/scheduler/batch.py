"""The batch of one step: the requests that it runs, and how its result gets into the columns
(`commit`).

SGLang has one ScheduleBatch for a step and for the requests that decode. Here a Batch describes one
step and does not change afterwards, and the running batch is an array of rows. `commit` appends
tokens and finds the requests that end with them; the scheduler then releases their rows and sends
their final replies.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.messages.replies import FinishReason
from weft.plan.step import ForwardMode, Plan, Result
from weft.scheduler.request import Columns, Request, RowFacts

NO_ROWS = np.empty(0, dtype=np.int32)
NO_SLOTS = np.empty(0, dtype=np.int32)


class RunningBatch:
    """The rows that decode, in the order in which they began to decode."""

    def __init__(self) -> None:
        self.rows: IntArray = NO_ROWS  # [n]

    def merge(self, rows: list[int]) -> None:
        if rows:
            self.rows = np.concatenate([self.rows, np.array(rows, dtype=np.int32)])

    def reset(self) -> None:
        """No row decodes any more."""
        self.rows = NO_ROWS

    def remove(self, row: int) -> None:
        """Remove a row, if it is in the batch."""
        self.rows = self.rows[self.rows != row]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Some of the tokens that a step samples: n of the S. A row with drafts has one entry for each
    of its tokens."""

    index: IntArray  # [n] index of the token, 0..S-1
    rows: list[int]  # [n]
    lens: list[int]  # [n] number of tokens before it in its sequence


class Batch:
    """The requests of one step: prefilled requests first, then decoding rows. R requests, S sampled
    tokens."""

    __slots__ = (
        "blocks_overlap",
        "epochs",
        "facts",
        "lens",
        "mode",
        "plan",
        "prefills",
        "prompt_only_rows",
        "rows",
        "sample_lens",
        "sample_rows",
        "starts",
    )

    def __init__(
        self,
        mode: ForwardMode,
        prefills: list[Request],
        rows: IntArray,
        starts: IntArray,
        lens: IntArray,
        samples: BoolArray,
        columns: Columns,
    ) -> None:
        self.mode = mode
        self.prefills = prefills  # in the order of the first rows
        self.rows = rows  # [R]
        self.starts = starts  # [R] position of the first token of each row in this step
        self.lens = lens  # [R] number of tokens of each row in this step
        # [S] number of tokens in the sequence before the sampled one
        self.sample_lens: IntArray = starts + lens
        if np.count_nonzero(samples) == len(samples):
            self.facts = columns.facts(rows)  # [S]
            self.epochs: IntArray = self.facts.epochs  # [R]
        else:
            self.facts = columns.facts(rows[samples])
            self.epochs = columns.epoch.take(rows)
            self.sample_lens = self.sample_lens[samples]
        self.sample_rows: IntArray = self.facts.rows  # [S]
        # Rows that end with this step, without a token, and their epochs.
        self.prompt_only_rows: list[tuple[int, int]] = []
        for request in prefills:
            if request.wants_tokens or not request.completes:
                continue
            epoch = int(columns.epoch[request.row])
            self.prompt_only_rows.append((request.row, epoch))
        # whether the next step is planned only after the result of this one
        self.blocks_overlap = False
        self.plan: Plan

    def sampling_in(self, rows: Container[int]) -> SampledRows:
        """The tokens that are sampled for one of `rows`."""
        index: list[int] = []
        found: list[int] = []
        for i, row in enumerate(self.sample_rows.tolist()):
            if row in rows:
                index.append(i)
                found.append(row)
        places = np.array(index, dtype=np.int32)
        return SampledRows(places, found, self.sample_lens[places].tolist())

    def num_there(self, columns: Columns) -> IntArray:
        """[S] how many of the tokens before each sampled one have their ids in the columns: all, or
        all but the last, which only the device knows."""
        there: IntArray = columns.known_len.take(self.sample_rows)
        return there

    def is_live(self, columns: Columns) -> BoolArray:
        """[S] whether each sampled token counts: whether its request still has its row."""
        if self.facts.as_of == columns.num_changes:
            return np.ones(len(self.sample_rows), dtype=np.bool_)
        live: BoolArray = columns.epoch.take(self.sample_rows) == self.facts.epochs
        return live


# The result of a step


class End(NamedTuple):
    """A request that ends with its last token."""

    row: int
    reason: FinishReason
    matched: int | None = None  # the token that stopped it
    message: str = ""  # the reason, for an error


class Forced(NamedTuple):
    """Tokens that follow a row's sampled token because no other token is allowed. They are not
    sampled, and the row's next step computes them together. No step is in flight after the one that
    sampled."""

    row: int
    tokens: tuple[int, ...]  # no more than `Columns.max_len` allows


class Outcome(NamedTuple):
    ids: LongArray  # [n] Request.id
    tokens: IntArray  # [n]
    ends: list[End]


def commit(
    columns: Columns,
    batch: Batch,
    result: Result,
    is_eos: BoolArray,
    others: Sequence[End] = (),
    forced: Sequence[Forced] = (),
) -> Outcome:
    """Append the tokens of requests that still have their row, and return the requests that end.

    `is_eos` [vocab_size] marks the model's end-of-sequence tokens. A request whose logits were not
    finite gets no token and ends with an error. `others` are ends that features have found (with
    the last of the `forced` tokens, if there are some). An end by a stop token overrides them, and
    they override an end by length.
    """
    if batch.prefills:
        _note_reported(batch)
    live = batch.is_live(columns)
    errors: list[End] = []
    if result.invalid is not None:
        # A feature that ends a request with an error knows why its output is not finite.
        explained = {end.row for end in others if end.reason == "error"}
        errors = _errors(batch, result, live & result.invalid)
        errors = [end for end in errors if end.row not in explained]
        live &= ~result.invalid
    facts = batch.facts
    tokens: IntArray = result.first_tokens
    known: IntArray = batch.sample_lens
    if np.count_nonzero(live) < len(live):
        facts = facts.some(live)
        tokens = tokens[live]
        known = known[live]
    places = facts.at * columns.tokens.shape[1] + known
    columns.tokens.reshape(-1)[places] = tokens
    known = known + 1
    columns.known_len[facts.at] = known

    # By row. `setdefault` below: an end by length counts only if no other was found.
    found: dict[int, End] = {}
    for end in others:
        found[end.row] = end
    for row, epoch in batch.prompt_only_rows:
        if columns.epoch[row] == epoch:
            found.setdefault(row, End(row, "length"))
    stops = stopped(columns, facts, tokens, is_eos)
    max_len = facts.max_len
    if facts.as_of != columns.num_changes:
        # Only this fact of a request can change: memory may have been lost since.
        max_len = columns.max_len.take(facts.at)
    ended = stops | (known >= max_len)
    for i in np.flatnonzero(ended).tolist():
        row = int(facts.rows[i])
        if stops[i]:
            found[row] = End(row, "stop", int(tokens[i]))
        else:
            found.setdefault(row, End(row, "length"))

    ids = facts.ids
    more: Sequence[Forced] = forced
    if result.counts is not None:
        more = [*_after_first(columns, batch, result, result.counts, live), *forced]
    if more:
        more_rows, more_tokens = _append(columns, more, is_eos, found)
        ids = np.concatenate([ids, columns.ids[more_rows]])
        tokens = np.concatenate([tokens, more_tokens])
    return Outcome(ids, tokens, [*errors, *found.values()])


def slots_of_ended(columns: Columns, batch: Batch, result: Result) -> IntArray:
    """The slots that a step wrote for requests that have ended since and whose outputs were not
    finite. The slots may be in the cache, because the fault was not known when these requests
    ended."""
    if result.invalid is None or not result.invalid.any():
        return NO_SLOTS
    is_worthless = result.invalid & ~batch.is_live(columns)
    if not is_worthless.any():
        return NO_SLOTS
    is_row = np.isin(batch.rows, batch.sample_rows[is_worthless])
    slots: IntArray = batch.plan.slots[np.repeat(is_row, batch.lens)]
    return slots


def _note_reported(batch: Batch) -> None:
    """Note how far the outputs for prompt tokens have been reported: as far as this step
    computed."""
    ends = (batch.starts + batch.lens).tolist()
    for request, end in zip(batch.prefills, ends, strict=False):
        request.reported_len = max(request.reported_len, end)


def _errors(batch: Batch, result: Result, invalid: BoolArray) -> list[End]:
    """The ends of the sampling requests that are `invalid` [S]."""
    faults = dict(result.faults)
    ends = []
    for i in np.flatnonzero(invalid).tolist():
        row = int(batch.sample_rows[i])
        message = faults.get(i, "the model's output was not finite")
        ends.append(End(row, "error", message=message))
    return ends


def stopped(columns: Columns, facts: RowFacts, tokens: IntArray, is_eos: BoolArray) -> BoolArray:
    """[n] whether the token that each of n rows got stops its request."""
    stops: BoolArray = is_eos.take(tokens) & facts.stops_at_eos
    # Few requests have stop tokens of their own.
    if np.count_nonzero(facts.has_stop_ids):
        for i in np.flatnonzero(facts.has_stop_ids).tolist():
            request: Request = columns.requests[facts.rows[i]]
            stop_ids = request.message.sampling.stop_token_ids
            stops[i] |= int(tokens[i]) in stop_ids
    return stops


def _after_first(
    columns: Columns, batch: Batch, result: Result, counts: IntArray, live: BoolArray
) -> list[Forced]:
    """The tokens after the first one that a step gave to `live` [S] requests. `counts` [S] is the
    number of tokens of each request."""
    more = []
    ends = np.cumsum(counts).tolist()
    for i, (end, count) in enumerate(zip(ends, counts.tolist(), strict=True)):
        if not live[i]:
            continue
        row = int(batch.sample_rows[i])
        room = int(columns.max_len[row] - columns.known_len[row])
        after_first = result.tokens[end - count + 1 : end]
        tokens = after_first[:room].tolist()
        if tokens:
            more.append(Forced(row, tuple(tokens)))
    return more


def _append(
    columns: Columns, forced: Sequence[Forced], is_eos: BoolArray, found: dict[int, End]
) -> tuple[IntArray, IntArray]:
    """Append forced tokens, for each row up to a token that stops it, and add to the ends `found`.

    Returns rows and tokens.
    """
    rows: list[int] = []
    appended: list[int] = []
    for row, tokens in forced:
        if row in found and found[row].matched is not None:
            continue  # an earlier token has stopped it
        request: Request = columns.requests[row]
        stops = set(request.message.sampling.stop_token_ids)
        for token in tokens:
            columns.tokens[row, columns.known_len[row]] = token
            columns.known_len[row] += 1
            rows.append(row)
            appended.append(token)
            if token in stops or (is_eos[token] and columns.stops_at_eos[row]):
                found[row] = End(row, "stop", token)
                break
        columns.seq_len[row] = columns.known_len[row]
        if columns.known_len[row] >= columns.max_len[row]:
            found.setdefault(row, End(row, "length"))
    return np.array(rows, dtype=np.int32), np.array(appended, dtype=np.int32)
