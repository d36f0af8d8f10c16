"""A budget of reasoning: after so many tokens its end mark is put in, token by token, then the answer goes on.

What is due follows from the output alone (`due`), so it is the same after a retraction, and no state is kept but who
has a budget. Before the budget can be used up nothing is looked at and steps overlap; the step before that moment and
those that may be followed by a token of the mark are awaited, for the next one depends on what they sample.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.messages.sampling import ThinkingMarks
from weft.plan.step import Fixed
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request

MAX_LEAD = 4  # tokens (white space) that may stand before the begin mark
OVER = -1  # there is no reasoning, or none any more
NOTHING = -2


class ThinkingBudget(Part):
    """Keeps, by row, the budgets that may still be used up."""

    def __init__(self) -> None:
        self._budgets: dict[int, tuple[int, ThinkingMarks]] = {}

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            budget, marks = request.sampling.thinking_budget, request.sampling.thinking_marks
            if budget is not None and marks is not None:
                self._budgets[request.row] = budget, marks
        if not self._budgets:
            return
        fixed: list[tuple[int, int]] = []
        for i, row in enumerate(batch.sample_rows.tolist()):
            if row not in self._budgets:
                continue
            budget, marks = self._budgets[row]
            begin, end = int(columns.prompt_len[row]), int(columns.seq_len[row]) - 1
            if end - begin < budget - 1:
                continue
            token = (
                due(columns.tokens[row, begin:end], marks, budget)
                if end - begin >= budget
                else NOTHING
            )
            if token == OVER:
                del self._budgets[row]
                continue
            extras.blocks_overlap = True
            if token != NOTHING:
                fixed.append((i, token))
        if fixed:
            extras.fixed = Fixed(*np.array(fixed, dtype=np.int32).T)

    def release(self, request: Request) -> None:
        self._budgets.pop(request.row, None)


def due(output: IntArray, marks: ThinkingMarks, budget: int) -> int:
    """The token that must follow `output` [n], or NOTHING, or OVER. Cost: proportional to n."""
    start = _begin(output, marks)
    if start < 0:
        return start
    reasoning = output[start:]
    if _find(reasoning, marks.end) >= 0:
        return OVER
    return marks.end[_begun(reasoning, marks.end)] if len(reasoning) >= budget else NOTHING


def _begin(output: IntArray, marks: ThinkingMarks) -> int:
    """Where the reasoning begins; NOTHING if it may come yet, OVER if it will not."""
    most = MAX_LEAD + len(marks.begin)
    place = _find(output[:most], marks.begin)
    if place >= 0:
        return place + len(marks.begin)
    if marks.is_open:
        return 0
    return NOTHING if len(output) < most else OVER


def _begun(output: IntArray, mark: tuple[int, ...]) -> int:
    """How many tokens of `mark`, not all, `output` ends with."""
    tail = output[-len(mark) :].tolist()
    return next(
        size
        for size in range(len(mark) - 1, -1, -1)
        if tail[len(tail) - size :] == list(mark[:size])
    )


def _find(tokens: IntArray, mark: tuple[int, ...]) -> int:
    """The first place of `mark` in `tokens`; -1 if there is none."""
    text, needle = tokens.astype(np.int32).tobytes(), np.array(mark, dtype=np.int32).tobytes()
    place = text.find(needle)
    while place % 4 and place >= 0:
        place = text.find(needle, place + 1)
    return place // 4 if place >= 0 else -1
