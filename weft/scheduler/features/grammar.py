"""Structured output: requests wait until their grammar is compiled, then sample under its masks.

What is decided follows from what the grammar service says: which grammars are ready (`take`), and what became of each
token (`advance`). Both are inputs of the core, like the results of steps, and recorded like these. A mask depends on
every token before it: the loop does not plan ahead of a step that has one (`loop.py`). It is not looked at here: the
plan carries the promise of it.

Where nothing but one text may follow, its tokens are appended without being sampled, and computed together in the next
step. A grammar may hold from the end of the reasoning on: until then its request has no mask, but its steps are awaited
all the same, for each token may be the one that ends it, and the output may not end before its structure has come.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.grammar.masks import LazyBitmaskRow, LazyBitmaskRows
from weft.grammar.protocol import CONTINUE, CompileResult, Constraint, Grammars, Key
from weft.messages.replies import FinishReason
from weft.messages.sampling import SamplingParams, ThinkingMarks
from weft.plan.step import Mask, Result
from weft.scheduler.batch import Batch
from weft.scheduler.commit import End, Forced
from weft.scheduler.feature import Extras, Part, StepReplies
from weft.scheduler.feature import Verdict as Admission
from weft.scheduler.features.bias import forbidden
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request

MAX_JUMP = 32  # tokens: others wait for their next token while they are computed


class GrammarPart(Part):
    """Keeps, by the number of its request, each place in a grammar. It stays through retractions."""

    def __init__(self, grammars: Grammars, eos_token_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._constraints: dict[int, Constraint] = {}
        self._thinking: dict[
            int, ThinkingMarks
        ] = {}  # those whose grammar does not hold yet, or perhaps not
        self._sampled: set[int] = set()  # those of which no token is forced
        self.queue: dict[int, Key] = {}  # requests whose grammar is being compiled, as they came
        self.num_asked = self.num_hits = self.num_refused = self.num_forced = 0

    def begin(self, id: int, sampling: SamplingParams, tenant: str) -> None:
        """The request of `tenant`, which has a grammar, has been queued."""
        grammar = sampling.grammar
        assert grammar is not None
        key = self.queue[id] = Key(grammar.kind, grammar.text, grammar.strict)
        if (marks := grammar.behind) is not None and (marks.is_open or len(marks.begin) == 1):
            self._thinking[id] = marks
        if _samples_all(sampling):
            self._sampled.add(id)
        self.num_asked += 1
        self._grammars.ask(id, key, tenant)

    def take(self) -> list[CompileResult]:
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

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        if not self._constraints:
            return
        ids = columns.ids[batch.sample_rows].tolist()
        places = [i for i, id in enumerate(ids) if id in self._constraints]
        if not places:
            return
        extras.blocks_overlap = True
        masks = {i: mask for i in places if (mask := self._mask(ids[i])) is not None}
        if masks:
            extras.mask = Mask(
                index=np.array(list(masks), dtype=np.int32),
                promise=LazyBitmaskRows(list(masks.values())),
            )
        if len(masks) < len(places) and len(self._eos):
            open_ended = [
                i for i in places if i not in masks and columns.stops_at_eos[batch.sample_rows[i]]
            ]
            extras.biases += [forbidden(i, self._eos) for i in open_ended]

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        if not self._constraints:
            return
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        rows: IntArray = batch.sample_rows[live]
        sampled = zip(
            columns.ids[rows].tolist(), rows.tolist(), result.tokens[live].tolist(), strict=True
        )
        left = (
            columns.max_len[rows] - columns.known_len[rows] - 1
        ).tolist()  # behind the sampled token
        taken = [
            (row, self._constraints[id], token, 0 if id in self._sampled else min(most, MAX_JUMP))
            for (id, row, token), most in zip(sampled, left, strict=True)
            if id in self._constraints and self._holds(id, row, token, columns)
        ]
        if not taken:
            return
        places, constraints, tokens, room = zip(*taken, strict=True)
        for row, move in zip(
            places, self._grammars.advance(constraints, tokens, room), strict=True
        ):
            if move is CONTINUE:
                continue
            if move.forced:
                self.num_forced += len(move.forced)
                replies.forced.append(Forced(row, move.forced))
            if move.error:
                replies.ends.append(End(row, "error", message=move.error))
            elif move.is_complete:
                replies.ends.append(End(row, "stop"))

    def _mask(self, id: int) -> LazyBitmaskRow | None:
        """What the request's next token may be; None: anything."""
        constraint, marks = self._constraints[id], self._thinking.get(id)
        if marks is None:
            return constraint.mask
        return None if marks.is_open else constraint.mask._replace(also=marks.begin[0])

    def _holds(self, id: int, row: int, token: int, columns: Columns) -> bool:
        """Whether a token that was sampled is the grammar's, and not of the reasoning before it."""
        marks = self._thinking.get(id)
        if marks is None:
            return True
        if marks.is_open:
            if _ends_with(marks.end, row, token, columns):
                del self._thinking[id]
            return False
        if (token,) == marks.begin:
            self._thinking[id] = ThinkingMarks(marks.begin, marks.end, is_open=True)
            return False
        del self._thinking[id]  # it does not think
        return True

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self._constraints.pop(request.id, None)
        self._thinking.pop(request.id, None)
        self._sampled.discard(request.id)
        if self.queue.pop(request.id, None) is not None:
            self._grammars.cancel(request.id)


def _ends_with(end: tuple[int, ...], row: int, token: int, columns: Columns) -> bool:
    """Whether the known tokens of a row, and `token` behind them, end with these."""
    known = int(columns.known_len[row])
    before = columns.tokens[row, max(known - len(end) + 1, 0) : known].tolist()
    return (*before, token) == end


def _samples_all(sampling: SamplingParams) -> bool:
    """Whether each token must be sampled: something is wanted of it, or something else has a say in what it is."""
    return (
        sampling.logprobs is not None
        or sampling.hidden_states is not None
        or sampling.min_new_tokens > 0
        or bool(
            sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_word_ids
            or sampling.processors
        )
    )
