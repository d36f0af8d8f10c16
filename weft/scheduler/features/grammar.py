"""Structured output: requests wait until their grammar is compiled, then sample under its bitmasks.

The decisions follow from the answers of the grammar service: which grammars are ready (`take`), and
whether each token is allowed (`advance`). Both are inputs of the core, and are recorded like the
results of steps. A bitmask depends on every token before it, so such a step blocks the overlap
(`engine/loop.py`). This module does not read the bits: the plan carries a `LazyBitmask`, which may
still be being computed.

Where the grammar allows only one text, its tokens are appended without sampling, and computed
together in the next step. A grammar may begin to apply at the end of the reasoning. Until then its
request has no bitmask, but its steps block the overlap, because each token may end the reasoning,
and the output may not end before its structure.

A draft is kept as far as the grammar allows it and leaves a choice after it (`follow`). Each
position of the draft has a bitmask, which is computed on a copy; the grammar itself advances by the
tokens that are kept.

    known | d1 | d2 | </think> | d4 | d5        d1 to d5 are drafts
     any   any   any   grammar   grammar ...    what may be sampled after each
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.grammar.masks import LazyBitmaskRow, LazyBitmaskRows
from weft.grammar.protocol import CONTINUE, CompileResult, Constraint, Grammars, Key
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams, ThinkingMarks
from weft.plan.logits import GrammarMask
from weft.plan.step import Result
from weft.scheduler.batch import Batch, End, Forced
from weft.scheduler.feature import Admission, Feature, StepEffects, StepInputs
from weft.scheduler.features.bias import forbidden, joined
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request

COMPILING = "its grammar is being compiled"
MAX_JUMP = 32  # tokens: other requests wait for their next token while these are computed


class GrammarFeature(Feature):
    """Keeps the position of each open request in its grammar, by id, also after a retraction."""

    sampling_fields = ("grammar",)

    def __init__(self, grammars: Grammars, eos_token_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._constraints: dict[int, Constraint] = {}
        # Requests whose grammar does not apply yet.
        self._thinking: dict[int, ThinkingMarks] = {}
        self._sampled: set[int] = set()  # requests that sample every token: none is forced
        # Bitmasks after each draft of the step that is being planned.
        self._ahead: dict[int, list[LazyBitmaskRow | None]] = {}
        # requests whose grammar is being compiled, in order of arrival
        self.queue: dict[int, Key] = {}
        self.num_asked = 0
        self.num_hits = 0
        self.num_shared = 0  # waited for a compilation that another request had started
        self.num_refused = 0
        self.num_forced = 0

    def arrive(self, message: GenerateRequest) -> None:
        grammar = message.sampling.grammar
        assert grammar is not None
        key = Key(grammar.kind, grammar.text, grammar.strict)
        self.queue[message.id] = key
        marks = grammar.behind
        if marks is not None and (marks.is_open or len(marks.begin) == 1):
            self._thinking[message.id] = marks
        if _samples_all(message.sampling):
            self._sampled.add(message.id)
        self.num_asked += 1
        self._grammars.ask(message.id, key, message.tenant)

    def take(self) -> list[CompileResult]:
        """The grammars that were compiled or refused since the last call.

        The caller ends the requests whose grammar is refused.
        """
        results = [result for result in self._grammars.take() if result.id in self.queue]
        compiled: set[Key] = set()
        for result in results:
            self.num_hits += not result.compile_s
            if result.compile_s:
                key = self.queue[result.id]
                self.num_shared += key in compiled
                compiled.add(key)
            self.num_refused += result.constraint is None
            if result.constraint is not None:
                del self.queue[result.id]
                self._constraints[result.id] = result.constraint
        return results

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id in self.queue else Admission.READY

    def why_waits(self, request: Request) -> str:
        return COMPILING

    def cut_draft(self, request: Request, columns: Columns, draft: IntArray) -> int:
        id = request.id
        constraint = self._constraints[id]
        known = columns.tokens[request.row, : columns.known_len[request.row]]
        ahead = _reasoning_ahead(constraint, self._thinking.get(id), known, draft)
        rest = draft[len(ahead) :].tolist()
        if rest:
            ahead += self._grammars.follow(constraint, rest, jumps=id not in self._sampled)
        self._ahead[id] = ahead
        return len(ahead)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        masked: list[int] = []
        masks: list[LazyBitmaskRow] = []
        open_ended: list[int] = []  # requests that still reason and may not end yet
        rows = batch.sample_rows
        num_drafts = batch.sample_lens - columns.known_len[rows]  # before each sampled token
        places = zip(columns.ids[rows].tolist(), num_drafts.tolist(), strict=True)
        for i, (id, position) in enumerate(places):
            constraint = self._constraints.get(id)
            if constraint is None:
                continue
            step.blocks_overlap = True
            if position > 0:
                mask = self._ahead[id][position - 1]
            else:
                mask = _mask_at(constraint, self._thinking.get(id))
            if mask is not None:
                masked.append(i)
                masks.append(mask)
            elif columns.stops_at_eos[rows[i]]:
                open_ended.append(i)
        self._ahead.clear()
        if masked:
            index = np.array(masked, dtype=np.int32)
            step.logits.append(GrammarMask(index, LazyBitmaskRows(masks)))
        if open_ended and len(self._eos):
            step.logits.append(joined([forbidden(i, self._eos) for i in open_ended]))

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        rows: IntArray = batch.sample_rows[live]
        ends: IntArray = batch.sample_lens[live]
        tokens: IntArray = result.first_tokens[live]
        # Tokens that fit after the sampled one.
        left = columns.max_len[rows] - ends - 1
        sampled = zip(rows.tolist(), ends.tolist(), tokens.tolist(), left.tolist(), strict=True)
        taken_rows: list[int] = []
        constraints: list[Constraint] = []
        taken: list[int] = []
        room: list[int] = []
        for id, (row, end, token, most) in zip(columns.ids[rows].tolist(), sampled, strict=True):
            constraint = self._constraints.get(id)
            if constraint is None or not self._holds(id, columns.tokens[row, :end], token):
                continue
            taken_rows.append(row)
            constraints.append(constraint)
            taken.append(token)
            room.append(0 if id in self._sampled else min(most, MAX_JUMP))
        if not taken:
            return
        advances = self._grammars.advance(constraints, taken, room)
        for row, advance in zip(taken_rows, advances, strict=True):
            if advance is CONTINUE:
                continue
            if advance.forced:
                self.num_forced += len(advance.forced)
                effects.forced.append(Forced(row, advance.forced))
            if advance.error:
                effects.ends.append(End(row, "error", message=advance.error))
            elif advance.is_complete:
                effects.ends.append(End(row, "stop"))

    def _holds(self, id: int, before: IntArray, token: int) -> bool:
        """Whether the grammar applies to a token sampled after `before`, which is then not part of
        the reasoning."""
        marks = self._thinking.get(id)
        if marks is None:
            return True
        stage = _stage(marks, before, token)
        if stage.marks is None:
            del self._thinking[id]
        else:
            self._thinking[id] = stage.marks
        return stage.is_waiting

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self._constraints.pop(request.id, None)
        self._thinking.pop(request.id, None)
        self._sampled.discard(request.id)
        if self.queue.pop(request.id, None) is not None:
            self._grammars.cancel(request.id)


class Stage(NamedTuple):
    """The state of an output after a token."""

    marks: ThinkingMarks | None  # marks of reasoning that is open or may begin; None: neither
    is_waiting: bool  # whether the grammar applies to the token


WAITING = Stage(None, is_waiting=True)


def _stage(marks: ThinkingMarks | None, before: IntArray, token: int) -> Stage:
    """The state of an output after `token`, which follows the tokens `before` [n]. Without `marks`,
    the grammar applies already."""
    if marks is None:
        return WAITING
    if marks.is_open:
        num_before = len(marks.end) - 1
        tail = before[len(before) - num_before :].tolist() if num_before else []
        if (*tail, token) == marks.end:
            return Stage(None, is_waiting=False)
        return Stage(marks, is_waiting=False)
    if (token,) == marks.begin:
        return Stage(ThinkingMarks(marks.begin, marks.end, is_open=True), is_waiting=False)
    return WAITING  # the output has no reasoning


def _reasoning_ahead(
    constraint: Constraint, marks: ThinkingMarks | None, known: IntArray, draft: IntArray
) -> list[LazyBitmaskRow | None]:
    """The tokens allowed after each token of a draft, up to the first one to which the grammar
    applies."""
    ahead: list[LazyBitmaskRow | None] = []
    if marks is None:
        return ahead
    text = np.concatenate([known[-len(marks.end) :], draft])
    for position in range(len(text) - len(draft), len(text)):
        stage = _stage(marks, text[:position], int(text[position]))
        if stage.is_waiting:
            break
        marks = stage.marks
        ahead.append(_mask_at(constraint, marks))
        if marks is None:
            break
    return ahead


def _mask_at(constraint: Constraint, marks: ThinkingMarks | None) -> LazyBitmaskRow | None:
    """The tokens that are allowed next; None: any."""
    if marks is None:
        return constraint.mask
    if marks.is_open:
        return None
    return constraint.mask._replace(also=marks.begin[0])


def _samples_all(sampling: SamplingParams) -> bool:
    """Whether each token must be sampled, because the request asks for outputs of each token, or
    because more than the grammar decides on tokens."""
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
