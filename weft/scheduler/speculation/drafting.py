"""Steps of a draft model between those of the model.

        step n      the model computes known tokens, and drafts
        step n+1    the draft model guesses the tokens after those that step n has kept
        step n+2    the model computes the guesses
    ...

A step of the draft model is always followed by one of the model, so that requests make progress
even if the drafts are wrong. With overlap, no step is planned beside one after which guesses are
considered.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.plan.step import Drafting, ForwardMode, Plan, Result, Sampling
from weft.scheduler.batch import NO_ROWS, Batch
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request, RowFacts
from weft.scheduler.speculation.guessing import Guess, Guesser
from weft.scheduler.speculation.planner import SpeculativePlanner
from weft.scheduler.speculation.speculator import Speculator


class GuessBatch(Batch):
    """A step of the draft model: no request gets a token from it. R rows guess, S is 0."""

    __slots__ = ("guesses",)

    def __init__(self, guesses: list[Guess], facts: RowFacts) -> None:
        """`facts` [R] of the rows that guess."""
        self.mode = ForwardMode.DRAFT
        self.prefills = []
        self.rows = facts.rows
        self.starts = np.array([guess.start for guess in guesses], dtype=np.int32)
        self.lens = np.array([guess.length for guess in guesses], dtype=np.int32)
        self.epochs = facts.epochs
        self.facts = facts
        self.sample_lens = NO_ROWS
        self.sample_rows = NO_ROWS
        self.prompt_only_rows = []
        self.blocks_overlap = True
        self.guesses = guesses


class DraftingPlanner(SpeculativePlanner):
    def __init__(
        self,
        kv: KvMemory,
        hooks: FeatureHooks,
        speculator: Speculator,
        guesser: Guesser,
        max_tokens: int,
    ) -> None:
        super().__init__(kv, hooks, speculator, max_tokens)
        self._guesser = guesser
        self._has_guessed = False  # whether the last step was one of the draft model

    def make_batch(self, prefills: list[Request], decode_rows: IntArray = NO_ROWS) -> Batch:
        if not prefills and not self._has_guessed:
            guesses = self._guesser.guesses(decode_rows)
            if guesses:
                self._has_guessed = True
                return self._guess_batch(guesses, decode_rows)
        was_guessed = self._has_guessed
        self._has_guessed = False
        batch = super().make_batch(prefills, decode_rows)
        if batch.plan.copies is not None:
            self._guesser.seen.copied(batch.plan.copies.sources, batch.plan.copies.targets)
        self._guesser.seen.written(batch.plan.slots)
        if was_guessed and not prefills:
            self._guesser.note_used({draft.row for draft in self._proposed})
        # Guesses follow known tokens. So steps overlap only while guesses do not pay.
        batch.blocks_overlap |= self._guesser.looks_next
        return batch

    def settle(self, batch: Batch, result: Result, is_eos: BoolArray) -> Result | None:
        if not isinstance(batch, GuessBatch):
            return super().settle(batch, result, is_eos)
        columns = self._columns
        begin = 0
        is_live = (columns.epoch[batch.rows] == batch.epochs).tolist()
        for guess, lives in zip(batch.guesses, is_live, strict=True):
            tokens = result.tokens[begin : begin + guess.num_drafts]
            begin += guess.num_drafts
            if lives and guess.num_drafts:
                self._guesser.keep(guess, tokens)
        return None

    def _guess_batch(self, guesses: list[Guess], decode_rows: IntArray) -> GuessBatch:
        """A step for some of the rows that decode."""
        columns = self._columns
        # The draft model samples into the same table of last tokens.
        self._listed_rows.update(guess.row for guess in guesses)
        rows = decode_rows
        if len(guesses) < len(decode_rows):
            rows = np.array([guess.row for guess in guesses], dtype=np.int32)
        batch = GuessBatch(guesses, columns.facts(rows))
        slots: list[IntArray] = []
        own_slots: list[IntArray] = []
        tokens: list[IntArray] = []
        positions: list[IntArray] = []
        for guess in guesses:
            of_tokens, of_drafts = self._guesser.seen.take(guess)
            slots.append(of_tokens)
            own_slots.append(of_drafts)
            # Placeholders of pictures are below 0. What is guessed after them changes no answer.
            tokens.append(np.maximum(columns.tokens[guess.row, guess.ids], 0))
            end = guess.num_known
            positions.append(np.arange(end, end + guess.num_drafts, dtype=np.int32))
        counts = np.array([guess.num_drafts for guess in guesses], dtype=np.int32)
        batch.plan = Plan(
            step=self.num_steps,
            mode=batch.mode,
            rows=rows,
            starts=batch.starts,
            lens=batch.lens,
            tokens=np.concatenate(tokens),
            slots=np.concatenate(slots),
            samples=counts > 0,
            sampling=Sampling(*batch.facts.sampling.repeated(counts), np.concatenate(positions)),
            table=self._kv.take_writes(),
            drafting=Drafting(counts, np.concatenate(own_slots)),
        )
        self.num_steps += 1
        return batch
