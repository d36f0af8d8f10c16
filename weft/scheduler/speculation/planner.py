"""Plans steps with drafts, and decides how much of their results counts.

        plan      tokens | known | d1 | d2 | d3 |    kv_len counts all of them, known_len no draft
        result           |  s1   | s2 | s3 | s4 |    the token that the model samples after each
        settle    d1 = s1, d2 = s2, d3 is not s3     s1, s2 and s3 count; the slot of d3 is freed

Each token that counts was computed after the tokens that precede it in the final sequence, with the
noise of its own position: so the answer is the same as without drafts.

With overlap, the next step is planned before that result is known. It begins with the run s1 to s4,
as if all of it counted, at fixed positions, and the device samples after the part that counts
(`plan/step.py`). Drafts after the run are lost if not all of it counts.

    plan      tokens | s1 | s2 | s3 | s4 | d5 |   seq_len counts s4 and the token after d5
    settle    of the step before: s3 is the last one that counts, and one token follows it here
              seq_len is that of s3 and the token, and d5 is lost
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, consecutive, or_zeros
from weft.plan.step import LAST_SAMPLED, ForwardMode, Result
from weft.scheduler.batch import Batch, stopped
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.kv import KvMemory
from weft.scheduler.planner import Planner, StepTokens, prepare_for_decode
from weft.scheduler.request import Columns, Request
from weft.scheduler.speculation.sources import DraftSource
from weft.scheduler.speculation.speculator import Draft, Speculator


class Follower(NamedTuple):
    """The next step of a row, if it was planned before this one was settled."""

    num_drafts: int
    counts_on_all: bool  # its drafts can count only if all of this step's run counts


class DraftedBatch(Batch):
    """A batch in which some rows sample several tokens."""

    __slots__ = ("counts", "drafts", "followed", "kept", "unsettled")

    def __init__(
        self,
        mode: ForwardMode,
        prefills: list[Request],
        work: StepTokens,
        columns: Columns,
        drafts: list[Draft],
    ) -> None:
        assert work.drafts is not None, "a batch without drafts"
        super().__init__(mode, prefills, work.rows, work.starts, work.lens, work.samples, columns)
        self.drafts = drafts
        # By row: the drafts of its previous step that were not compared when this step was planned.
        self.unsettled: dict[int, int] = {}
        if work.unsettled is not None:
            pairs = zip(work.rows.tolist(), work.unsettled.tolist(), strict=True)
            self.unsettled = {row: num for row, num in pairs if num}
        # By row: its next step, if that was planned before this one was settled.
        self.followed: dict[int, Follower] = {}
        self.counts: IntArray = work.drafts[work.samples] + 1  # tokens of each request that samples
        self.facts = self.facts.repeated(self.counts)
        self.sample_rows = self.facts.rows
        self.sample_lens = consecutive(self.sample_lens - (self.counts - 1), self.counts)
        self.kept: BoolArray = np.ones(len(self.sample_rows), dtype=np.bool_)  # [S], once settled

    def num_there(self, columns: Columns) -> IntArray:
        # Drafts follow the known tokens. A row without drafts may lack its last token.
        after_last = np.repeat(self.counts > 1, self.counts)
        return np.where(after_last, self.sample_lens, super().num_there(columns))

    def is_live(self, columns: Columns) -> BoolArray:
        return super().is_live(columns) & self.kept


class SpeculativePlanner(Planner):
    """`max_tokens`: of a step that computes prompts, with its drafts."""

    def __init__(
        self, kv: KvMemory, hooks: FeatureHooks, speculator: Speculator, max_tokens: int
    ) -> None:
        super().__init__(kv, hooks, speculator.pace)
        self._speculator = speculator
        self._max_tokens = max_tokens
        self._drafts: list[Draft] = []  # of the step that is being planned
        self._proposed: list[Draft] = []  # the same, with those that it has no time for
        self._planned: DraftedBatch | None = None  # the last batch, until it is settled
        # Rows whose last token the device may not have: it sampled other tokens last, after drafts.
        self._listed_rows: set[int] = set()

    def replace_sources(self, other: Callable[[DraftSource], DraftSource]) -> None:
        """Let `other` of each source stand in for it: simulated texts have nothing to search in."""
        self._speculator.sources = [other(source) for source in self._speculator.sources]

    def row_released(self, request: Request) -> None:
        self._listed_rows.discard(request.row)
        self._speculator.row_released(request)

    def settle(self, batch: Batch, result: Result, is_eos: BoolArray) -> Result | None:
        if not isinstance(batch, DraftedBatch):
            return result
        if self._planned is batch:
            self._planned = None
        columns = self._columns
        is_live = batch.is_live(columns)
        goes_on = is_live.copy()
        facts = batch.facts
        if not is_live.all():
            facts = facts.some(is_live)
        goes_on[is_live] = ~stopped(columns, facts, result.tokens[is_live], is_eos)
        if result.invalid is not None:
            goes_on &= ~result.invalid
        begins = np.cumsum(batch.counts) - batch.counts
        row_begins = dict(zip(batch.sample_rows[begins].tolist(), begins.tolist(), strict=True))
        drafts = {draft.row: draft for draft in batch.drafts}
        for row in {**drafts, **batch.unsettled}:
            begin = row_begins[row]
            if not is_live[begin]:
                continue
            draft = drafts.get(row)
            num_drafts = 0
            if draft is not None:
                num_drafts = len(draft.tokens)
            end = begin + num_drafts
            num_known = int(columns.known_len[row])
            num_expected = int(batch.sample_lens[begin])
            is_aligned = num_expected == num_known
            num_right = 0
            if draft is not None and is_aligned:
                is_right = result.tokens[begin:end] == draft.tokens
                is_right &= goes_on[begin:end]
                right_so_far = np.logical_and.accumulate(is_right)
                num_right = int(right_so_far.sum())
                self._speculator.learn(draft, num_right)
            elif draft is not None:
                self._speculator.lose(draft)
            # If drafts of the step before were wrong, this step has sampled further to the front.
            batch.sample_lens[begin] = num_known
            batch.kept[begin + num_right + 1 : end + 1] = False
            kv_len = num_known + num_right
            follower = batch.followed.get(row)
            if follower is not None:
                kv_len += 1
                all_right = is_aligned and num_right == num_drafts
                if all_right or not follower.counts_on_all:
                    kv_len += follower.num_drafts
            self._cut(row, kv_len)
        return result

    def _cut(self, row: int, kv_len: int) -> None:
        """Remove the drafts after the first `kv_len` tokens of a row."""
        columns = self._columns
        columns.tokens[row, kv_len : columns.kv_len[row]] = 0
        self._kv.cut(row, kv_len)
        columns.seq_len[row] = kv_len + 1

    def _list_decode(self, rows: IntArray, num_before: int) -> StepTokens:
        drafts = self._speculator.propose(rows)
        self._proposed = drafts
        self._drafts = []
        until: IntArray | None = None
        if drafts or self._listed_rows:
            columns = self._columns
            rows, in_time = self._in_time(rows, drafts)
            starts = columns.kv_len.take(rows)
            ends = columns.seq_len.take(rows)
            until = self._speculator.pace.forced_ends(rows, starts, ends, num_before)
            # Drafts follow the last known token, so it must be computed in this step.
            reached = set(rows[until == ends].tolist())
            beside = [draft for draft in in_time if draft.row in reached]
            self._drafts = self._fitting(rows, self._beside(rows, num_before, beside))
            used = {draft.row for draft in self._drafts}
            for draft in drafts:
                if draft.row not in used:
                    self._speculator.drop(draft)
        if until is not None and (self._drafts or self._listed_rows):
            work = prepare_with_drafts(self._kv, rows, self._drafts, until)
            self._note_listed(work)
        else:
            work = prepare_for_decode(self._kv, rows, self._pace, num_before)
        if self._planned is not None:
            self._planned.followed = followers(work)
            self._planned = None
        return work

    def _in_time(self, rows: IntArray, drafts: list[Draft]) -> tuple[IntArray, list[Draft]]:
        """The rows that take part in a step with drafts, and the drafts that it has time for."""
        if not drafts or not self._columns.turns:
            return rows, drafts
        counts = counts_of(rows, drafts)
        rows, counts = self._columns.beside_drafts(rows, counts)
        taken = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        found: list[Draft] = []
        for draft in drafts:
            tokens = draft.tokens[: taken.get(draft.row, 0)]
            if len(tokens):
                found.append(draft._replace(tokens=tokens))
        return rows, found

    def _note_listed(self, work: StepTokens) -> None:
        """Take note of whose next token must be listed by its id."""
        self._listed_rows.difference_update(work.rows.tolist())
        self._listed_rows.update(draft.row for draft in self._drafts)
        if work.unsettled is not None:
            self._listed_rows.update(work.rows[work.unsettled > 0].tolist())

    def _batch(self, mode: ForwardMode, prefills: list[Request], work: StepTokens) -> Batch:
        if work.drafts is None:
            return super()._batch(mode, prefills, work)
        batch = DraftedBatch(mode, prefills, work, self._columns, self._drafts)
        batch.blocks_overlap = not self._repeats_runs
        self._planned = batch
        return batch

    @property
    def _repeats_runs(self) -> bool:
        """Whether the next step may begin with the runs of this one, before its drafts are
        compared."""
        speculator = self._speculator
        return speculator.repeats_runs and all(speculator.is_plain(one.row) for one in self._drafts)

    def _beside(self, rows: IntArray, num_before: int, drafts: list[Draft]) -> list[Draft]:
        """The drafts that a step has room and time for beside `num_before` tokens of prompts."""
        room = self._speculator.pace.draft_room(num_before)
        if num_before:
            num_others = num_before + self._kv.room.decode_tokens(rows)
            room = min(room, self._max_tokens - num_others)
        if room == math.inf:
            return drafts
        return _first_of(drafts, int(room))

    def _fitting(self, rows: IntArray, drafts: list[Draft]) -> list[Draft]:
        """The first drafts for which there is memory in addition to that of the step itself."""
        kv = self._kv
        for group in kv.groups:
            num_tokens = sum(len(draft.tokens) for draft in drafts)
            drafts = _first_of(drafts, group.room_for_drafts(num_tokens))
        page_size = kv.page_size
        spare = kv.room.available - kv.room.decode_pages(rows) * page_size
        for i, draft in enumerate(drafts):
            num_pages = -(-len(draft.tokens) // page_size)
            spare -= num_pages * page_size
            if spare < 0:
                return drafts[:i]
        return drafts


def _first_of(drafts: list[Draft], num_tokens: int) -> list[Draft]:
    """The first `num_tokens` tokens of the drafts."""
    found: list[Draft] = []
    for draft in drafts:
        tokens = draft.tokens[: max(num_tokens, 0)]
        num_tokens -= len(tokens)
        if len(tokens):
            found.append(draft._replace(tokens=tokens))
    return found


def counts_of(rows: IntArray, drafts: list[Draft]) -> IntArray:
    """[R] How many drafts each of `rows` [R] has."""
    num_drafts = {draft.row: len(draft.tokens) for draft in drafts}
    counts = [num_drafts.get(row, 0) for row in rows.tolist()]
    return np.array(counts, dtype=np.int32)


def followers(work: StepTokens) -> dict[int, Follower]:
    """The part of a step that follows the last step of its rows, by row."""
    drafts = or_zeros(work.drafts, len(work.rows))
    unsettled = or_zeros(work.unsettled, len(work.rows))
    numbers = zip(
        work.rows.tolist(),
        drafts.tolist(),
        unsettled.tolist(),
        strict=True,
    )
    found: dict[int, Follower] = {}
    for row, num_drafts, num_open in numbers:
        found[row] = Follower(num_drafts, counts_on_all=num_open > 0)
    return found


def prepare_with_drafts(
    kv: KvMemory, rows: IntArray, drafts: list[Draft], run_ends: IntArray
) -> StepTokens:
    """Allocate and list the pending tokens of each decoding row up to `run_ends` [R], and its
    drafts.

    Known ids are listed as ids: after a step with drafts, the device may have sampled tokens last
    that do not count. A row whose last drafts are not compared begins with its last run:

        known_len            seq_len
        | -1 | -2 | -3 | drafts |
    """
    columns = kv.columns
    starts = columns.kv_len.take(rows)
    num_known = columns.known_len.take(rows)
    samples = run_ends == columns.seq_len.take(rows)
    ends = run_ends
    counts: IntArray | None = None
    unsettled: IntArray | None = None
    allocated = starts
    open_drafts = run_ends - num_known - 1  # below 0: the last token is known
    most_open = int(open_drafts.max(initial=-1))
    if most_open > 0:
        unsettled = np.maximum(open_drafts, 0)
        starts = np.where(unsettled > 0, num_known, starts)
        counts = np.zeros(len(rows), dtype=np.int32)
    if drafts:
        counts = counts_of(rows, drafts)
        for draft in drafts:
            begin = columns.seq_len[draft.row]
            columns.tokens[draft.row, begin : begin + len(draft.tokens)] = draft.tokens
        ends = ends + counts
    lens: IntArray = ends - starts
    row_of_token = rows
    positions = starts
    if int(lens.sum()) > len(rows):
        row_of_token = np.repeat(rows, lens)
        positions = consecutive(starts, lens)
    tokens: IntArray = columns.tokens[row_of_token, positions]
    if most_open >= 0:
        # Only the device knows the last run of some rows.
        num_known = np.repeat(num_known, lens)
        is_sampled = positions >= num_known
        is_sampled &= positions < np.repeat(run_ends, lens)
        of_run = num_known - positions
        tokens = np.where(is_sampled, LAST_SAMPLED + of_run, tokens).astype(np.int32)
    if unsettled is None:
        slots = kv.extend_running(row_of_token, positions)
    else:
        # The run has its slots already, except its last token.
        is_new = positions >= np.repeat(allocated, lens)
        kv.extend_running(row_of_token[is_new], positions[is_new])
        slots = kv.rows.slots_at(row_of_token, positions)
    columns.kv_len[rows] = ends
    columns.seq_len[rows[samples]] = ends[samples] + 1
    work = StepTokens(rows, starts, lens, tokens, slots, samples, counts)
    return work._replace(unsettled=unsettled)
