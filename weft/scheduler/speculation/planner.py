"""Steps with drafts: how they are listed, and what of their results counts.

    plan      tokens | known | d1 | d2 | d3 |    kv_len counts them all, known_len no draft
    result           |  s1   | s2 | s3 | s4 |    what the model says behind each
    settle    d1 = s1, d2 = s2, d3 is not s3     s1, s2 and s3 count; the slot of d3 is given back

Each token that counts was computed behind the tokens that stand before it in the end, with the
noise of its own position: the answer is what it would be without drafts. A step with drafts blocks
overlap, for the next one begins where the last right draft ends.
"""

from __future__ import annotations

import math

import numpy as np

from weft.arrays import BoolArray, IntArray, consecutive
from weft.plan.step import LAST_SAMPLED, ForwardMode, Result
from weft.scheduler.batch import Batch, stopped
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.kv import KvMemory
from weft.scheduler.planner import Planner, StepTokens
from weft.scheduler.request import Columns, Request
from weft.scheduler.speculation.speculator import Draft, Speculator


class DraftedBatch(Batch):
    """A batch in which some rows sample several tokens."""

    __slots__ = ("counts", "drafts", "kept")

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
        self.counts: IntArray = work.drafts[work.samples] + 1  # tokens of each request that samples
        self.sample_rows = np.repeat(self.sample_rows, self.counts)
        self.facts = columns.facts(self.sample_rows)
        self.sample_lens = consecutive(self.sample_lens - (self.counts - 1), self.counts)
        self.kept: BoolArray = np.ones(len(self.sample_rows), dtype=np.bool_)  # [S], once settled
        self.blocks_overlap = True

    def num_there(self, columns: Columns) -> IntArray:
        # The drafts stand behind what is known. A row without drafts may lack its last token.
        behind_last = np.repeat(self.counts > 1, self.counts)
        return np.where(behind_last, self.sample_lens, super().num_there(columns))

    def is_live(self, columns: Columns) -> BoolArray:
        return super().is_live(columns) & self.kept


class SpeculativePlanner(Planner):
    """`max_tokens`: of a step that computes prompts, with its drafts."""

    def __init__(
        self, kv: KvMemory, hooks: FeatureHooks, speculator: Speculator, max_tokens: int
    ) -> None:
        super().__init__(kv, hooks)
        self._speculator = speculator
        self._max_tokens = max_tokens
        self._drafts: list[Draft] = []  # of the step that is being planned

    def row_released(self, request: Request) -> None:
        self._speculator.row_released(request)

    def settle(self, batch: Batch, result: Result, is_eos: BoolArray) -> Result:
        if not isinstance(batch, DraftedBatch):
            return result
        columns = self._columns
        is_live = batch.is_live(columns)
        goes_on = ~stopped(columns, batch.facts, result.tokens, is_eos)
        if result.invalid is not None:
            goes_on &= ~result.invalid
        begins = np.cumsum(batch.counts) - batch.counts
        row_begins = dict(zip(batch.sample_rows[begins].tolist(), begins.tolist(), strict=True))
        for draft in batch.drafts:
            begin = row_begins[draft.row]
            if not is_live[begin]:
                continue
            end = begin + len(draft.tokens)
            is_right = (result.tokens[begin:end] == draft.tokens) & goes_on[begin:end]
            num_right = int(np.logical_and.accumulate(is_right).sum())
            batch.kept[begin + num_right + 1 : end + 1] = False
            self._speculator.learn(draft, num_right)
            self._cut(draft.row, int(batch.sample_lens[begin]) + num_right)
        return result

    def _cut(self, row: int, kv_len: int) -> None:
        """Leave nothing of the drafts behind the first `kv_len` tokens of a row."""
        columns = self._columns
        columns.tokens[row, kv_len : columns.kv_len[row]] = 0
        self._kv.cut(row, kv_len)
        columns.seq_len[row] = kv_len + 1

    def _list_decode(self, rows: IntArray, num_before: int) -> StepTokens:
        drafts = self._speculator.propose(rows)
        self._drafts = drafts
        if drafts:
            self._drafts = self._fitting(rows, self._beside(rows, num_before, drafts))
            for draft in drafts[len(self._drafts) :]:
                self._speculator.drop(draft)
        return prepare_with_drafts(self._kv, rows, self._drafts)

    def _batch(self, mode: ForwardMode, prefills: list[Request], work: StepTokens) -> Batch:
        if work.drafts is None:
            return super()._batch(mode, prefills, work)
        return DraftedBatch(mode, prefills, work, self._columns, self._drafts)

    def _beside(self, rows: IntArray, num_before: int, drafts: list[Draft]) -> list[Draft]:
        """The drafts that a step has room and time for beside `num_before` tokens of prompts."""
        room = self._speculator.pace.draft_room(num_before)
        if num_before:
            columns = self._columns
            num_others = num_before + int((columns.seq_len[rows] - columns.kv_len[rows]).sum())
            room = min(room, self._max_tokens - num_others)
        if room == math.inf:
            return drafts
        return _first_of(drafts, int(room))

    def _fitting(self, rows: IntArray, drafts: list[Draft]) -> list[Draft]:
        """The first of the drafts for which there is memory besides that of the step itself."""
        kv = self._kv
        page_size = kv.page_size
        spare = kv.available - kv.decode_pages(rows) * page_size
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


def prepare_with_drafts(kv: KvMemory, rows: IntArray, drafts: list[Draft]) -> StepTokens:
    """Allocate and list what is left to compute of each decoding row, and drafts behind it.

    Ids that are known are listed as such: after a step with drafts the device may have sampled last
    what does not count.
    """
    columns = kv.columns
    starts = columns.kv_len[rows]
    num_known = columns.known_len[rows]
    ends = columns.seq_len[rows]
    counts: IntArray | None = None
    if drafts:
        num_drafts = {draft.row: len(draft.tokens) for draft in drafts}
        counts = np.array([num_drafts.get(row, 0) for row in rows.tolist()], dtype=np.int32)
        for draft in drafts:
            begin = columns.known_len[draft.row]
            columns.tokens[draft.row, begin : begin + len(draft.tokens)] = draft.tokens
        num_known = num_known + counts
        ends = ends + counts
    lens: IntArray = ends - starts
    row_of_token = rows
    positions = starts
    if int(lens.sum()) > len(rows):
        row_of_token = np.repeat(rows, lens)
        positions = consecutive(starts, lens)
        num_known = np.repeat(num_known, lens)
    is_known = positions < num_known
    known = columns.tokens[row_of_token, positions]
    tokens = np.where(is_known, known, np.int32(LAST_SAMPLED))
    slots = kv.extend_running(row_of_token, positions)
    columns.kv_len[rows] = ends
    columns.seq_len[rows] = ends + 1
    samples = np.ones(len(rows), dtype=np.bool_)
    return StepTokens(rows, starts, lens, tokens, slots, samples, counts)
