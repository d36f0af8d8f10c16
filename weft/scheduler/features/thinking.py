"""A budget of reasoning tokens: when it is used up, the end mark is inserted, token by token, and
then the answer follows.

The inserted token follows from the output alone (`due`), so it is the same after a retraction, and
the feature keeps only the budgets. Until a budget can be used up, no output is read and steps
overlap. The step before that moment, and steps that may be followed by a token of the mark, block
the overlap, because the next step depends on the tokens that they sample.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.messages.sampling import ThinkingMarks
from weft.plan.logits import FixedTokens
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request

MAX_LEAD = 4  # white-space tokens that may precede the begin mark
OVER = -1  # there is no reasoning, or it has ended
NOTHING = -2


class ThinkingBudgetFeature(Feature):
    """Keeps, by row, the budgets that may still be used up."""

    sampling_fields = ("thinking_budget",)

    def __init__(self) -> None:
        self._budgets: dict[int, tuple[int, ThinkingMarks]] = {}

    def enter_row(self, request: Request) -> None:
        sampling = request.message.sampling
        if sampling.thinking_budget is not None and sampling.thinking_marks is not None:
            self._budgets[request.row] = sampling.thinking_budget, sampling.thinking_marks

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        index: list[int] = []
        tokens: list[int] = []
        found = batch.sampling_in(self._budgets)
        num_known = columns.known_len[found.rows].tolist()
        drafts = zip(found.index.tolist(), found.rows, found.lens, num_known, strict=True)
        for i, row, end, known in drafts:
            if row not in self._budgets:
                continue  # an earlier token of this row has shown that its reasoning is over
            budget, marks = self._budgets[row]
            begin = int(columns.prompt_len[row])
            if end - begin < budget - 1:
                continue
            token = NOTHING
            if end - begin >= budget:
                token = due(columns.tokens[row, begin:end], marks, budget)
            if token == OVER:
                # Tokens that depend on drafts may turn out to be wrong.
                if end <= known:
                    del self._budgets[row]
                continue
            step.blocks_overlap = True
            if token != NOTHING:
                index.append(i)
                tokens.append(token)
        if index:
            step.logits.append(
                FixedTokens(
                    index=np.array(index, dtype=np.int32),
                    tokens=np.array(tokens, dtype=np.int32),
                )
            )

    def release(self, request: Request) -> None:
        self._budgets.pop(request.row, None)


def due(output: IntArray, marks: ThinkingMarks, budget: int) -> int:
    """The token that must follow `output` [n]; NOTHING or OVER if there is none. Cost: linear in
    n."""
    start = _begin(output, marks)
    if start < 0:
        return start
    reasoning = output[start:]
    if _find(reasoning, marks.end) >= 0:
        return OVER
    if len(reasoning) < budget:
        return NOTHING
    return marks.end[_begun(reasoning, marks.end)]


def _begin(output: IntArray, marks: ThinkingMarks) -> int:
    """Where the reasoning begins; NOTHING if it may still begin, OVER if it will not."""
    most = MAX_LEAD + len(marks.begin)
    position = _find(output[:most], marks.begin)
    if position >= 0:
        return position + len(marks.begin)
    if marks.is_open:
        return 0
    return NOTHING if len(output) < most else OVER


def _begun(output: IntArray, mark: tuple[int, ...]) -> int:
    """The number of tokens of `mark`, not all of them, with which `output` ends."""
    tail = output[-len(mark) :].tolist()
    size = len(mark) - 1
    while tail[len(tail) - size :] != list(mark[:size]):
        size -= 1
    return size


def _find(tokens: IntArray, mark: tuple[int, ...]) -> int:
    """The first position of `mark` in `tokens`; -1 if there is none."""
    text = tokens.astype(np.int32).tobytes()
    needle = np.array(mark, dtype=np.int32).tobytes()
    position = text.find(needle)
    # Skip matches that do not begin at the first byte of a token.
    while position % 4 and position >= 0:
        position = text.find(needle, position + 1)
    return position // 4 if position >= 0 else -1
