"""The draft model of the oracle: it guesses as the oracle does, and is wrong now and then.

It keeps a hash of the tokens up to each slot, as the oracle does, and finds them through the same
table. Before it guesses it must have seen exactly what the oracle has: each token that it is not
given, it was given before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.plan.step import Drafting, ForwardMode, Plan, Result
from weft.scheduler.settings import SchedulerSettings

if TYPE_CHECKING:
    from tests.scheduler.oracle_runner import OracleRunner


class DraftOracle:
    def __init__(self, runner: OracleRunner, settings: SchedulerSettings) -> None:
        num_own = settings.max_running_requests * settings.max_draft
        self._runner = runner
        self._state = np.full(runner.num_slots + num_own, -1, dtype=np.int64)
        self._draft = settings.draft
        self.wrong_every = 4  # one of so many guesses is wrong; 0: none, 1: all
        self.right_every = 0  # not 0: and only one of so many is right
        self.num_steps = 0
        self.num_guesses = 0
        self.num_tokens = 0  # that it was given

    def execute(self, plan: Plan, drafting: Drafting) -> Result:
        from tests.scheduler.oracle_runner import extend_hash, next_token

        assert plan.mode is ForwardMode.DRAFT
        assert not plan.logits
        assert not plan.outputs
        assert plan.drafts is None
        assert (drafting.slots >= self._runner.num_slots).all()
        counts = drafting.counts.tolist()
        assert len(plan.sampling.seeds) == sum(counts)
        assert self._draft is not None
        assert plan.tokens.max() < self._draft.vocab_size
        table = self._runner.table
        tokens: list[int] = []
        at = 0
        own = 0
        sampled = 0
        numbers = zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), counts, strict=True
        )
        for row, start, length, count in numbers:
            slots = table[row, :start]
            # It reads ids where the model reads pictures.
            if self._runner.weights == 0 and self._runner.media is None:
                assert (self._state[slots] == self._runner.state[slots]).all(), "not seen"
            state = int(self._state[table[row, start - 1]]) if start else 0
            for i in range(at, at + length):
                state = extend_hash(state, int(plan.tokens[i]))
                self._state[plan.slots[i]] = state
            at += length
            for j in range(count):
                assert int(plan.sampling.positions[sampled]) == start + length + j
                sampled += 1
                token = next_token(state, self._runner.vocab_size)
                is_wrong = bool(self.wrong_every) and (state >> 7) % self.wrong_every == 0
                if self.right_every and (state >> 7) % self.right_every:
                    is_wrong = True
                if is_wrong:
                    token = (token + 1) % self._runner.vocab_size
                tokens.append(token)
                if j + 1 < count:
                    state = extend_hash(state, token)
                    self._state[drafting.slots[own]] = state
                    own += 1
        assert own == len(drafting.slots)
        self.num_steps += 1
        self.num_guesses += sum(counts)
        self.num_tokens += plan.num_tokens
        return Result(tokens=np.array(tokens, dtype=np.int32))
