"""Structured output: requests wait until their grammar is compiled, then sample under its masks.

What is decided follows from what the grammar service says: which grammars are ready (`take`), and what became of each
token (`advance`). Both are inputs of the core, like the results of steps, and recorded like these. A mask depends on
every token before it: the loop does not plan ahead of a step that has one (`loop.py`).
"""

from __future__ import annotations

import numpy as np

from weft.executor.plan import Mask, Result
from weft.grammar.protocol import Constraint, Grammars, Key, Verdict
from weft.messages.replies import FinishReason
from weft.scheduler.batch import Batch
from weft.scheduler.commit import End
from weft.scheduler.kv import KvMemory
from weft.scheduler.part import Part, SamplingExtras, StepReplies
from weft.scheduler.part import Verdict as Admission
from weft.scheduler.request import Columns, Request


class GrammarPart(Part):
    """Keeps, by the number of its request, each place in a grammar. It stays through retractions."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._constraints: dict[int, Constraint] = {}
        self.queue: dict[int, Key] = {}  # requests whose grammar is being compiled, as they came
        self.num_asked = self.num_hits = self.num_refused = 0

    def begin(self, id: int, key: Key) -> None:
        """The request has been queued."""
        self.queue[id] = key
        self.num_asked += 1
        self._grammars.ask(id, key)

    def take(self) -> list[Verdict]:
        """What has become of grammars since. Whose verdict is a refusal is to be ended by the caller."""
        verdicts = [verdict for verdict in self._grammars.take() if verdict.id in self.queue]
        for verdict in verdicts:
            self.num_hits += not verdict.compile_s
            self.num_refused += verdict.constraint is None
            if verdict.constraint is not None:
                del self.queue[verdict.id]
                self._constraints[verdict.id] = verdict.constraint
        return verdicts

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id in self.queue else Admission.READY

    def prepare(self, batch: Batch, columns: Columns, extras: SamplingExtras) -> None:
        if not self._constraints:
            return
        ids = columns.ids[batch.sample_rows].tolist()
        index = [i for i, id in enumerate(ids) if id in self._constraints]
        if index:
            masks = np.stack([self._constraints[ids[i]].mask for i in index])
            extras.mask = Mask(index=np.array(index, dtype=np.int32), words=masks)

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        mask = batch.plan.sampling.mask
        if mask is None:
            return
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        index = mask.index[live[mask.index]]
        rows = batch.sample_rows[index].tolist()
        constraints = [self._constraints[id] for id in columns.ids[rows].tolist()]
        moves = self._grammars.advance(constraints, result.tokens[index].tolist())
        for row, move in zip(rows, moves, strict=True):
            if move.error:
                replies.ends.append(End(row, "error", message=move.error))
            elif move.is_complete:
                replies.ends.append(End(row, "stop"))

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self._constraints.pop(request.id, None)
        if self.queue.pop(request.id, None) is not None:
            self._grammars.cancel(request.id)
