"""A runner without a model whose output depends on every token that came before, as a model's does.

Each slot stores a hash of the tokens up to its own; the next token is a function of the hash of the last one. The
runner reads that hash through its own row table, as attention reads K and V: if a page was shared, freed, evicted or
re-pointed wrongly, the outputs differ from `expected_output`, which looks only at the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weft.executor.plan import LAST_SAMPLED, Plan, Result

MASK = (1 << 61) - 1


def extend_hash(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7_919 + 12_345) & MASK


def next_token(state: int, vocab_size: int) -> int:
    return (state ^ (state >> 17)) % vocab_size


def expected_output(prompt: list[int], max_new: int, vocab_size: int, eos: set[int]) -> list[int]:
    state, output = 0, []
    for token in prompt:
        state = extend_hash(state, token)
    while len(output) < max_new:
        token = next_token(state, vocab_size)
        output.append(token)
        if token in eos:
            break
        state = extend_hash(state, token)
    return output


@dataclass
class OracleStep:
    runner: OracleRunner
    plan: Plan
    fails: bool = False

    def result(self) -> Result:
        if self.fails:
            raise RuntimeError("the device failed")
        return self.runner.execute(self.plan)

    def done(self) -> bool:
        return True


@dataclass
class OracleRunner:
    """Executes lazily, when the result is asked for: the latest that a device could."""

    num_slots: int
    num_rows: int
    max_len: int
    vocab_size: int
    fail_steps: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = np.zeros(self.num_slots, dtype=np.int64)  # hash of the sequence that ends in this slot
        self.table = np.zeros((self.num_rows, self.max_len), dtype=np.int32)
        self.last = np.zeros(self.num_rows, dtype=np.int32)
        self.num_tokens_run = 0

    def launch(self, plan: Plan) -> OracleStep:
        return OracleStep(self, plan, fails=plan.step in self.fail_steps)

    def execute(self, plan: Plan) -> Result:
        self._follow_table(plan)
        assert len(set(plan.slots.tolist())) == len(plan.slots), "two tokens of one step share a slot"
        sampled, at = [], 0
        states = []
        for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True):
            state = int(self.state[self.table[row, start - 1]]) if start else 0
            for i in range(at, at + length):
                token = int(plan.tokens[i])
                token = int(self.last[row]) if token == LAST_SAMPLED else token
                state = extend_hash(state, token)
                states.append((int(plan.slots[i]), state))
            at += length
            sampled.append((row, next_token(state, self.vocab_size)))
        for slot, state in states:  # written after all was read: no request may read what another writes in this step
            self.state[slot] = state
        self.num_tokens_run += plan.num_tokens
        tokens = [token for (row, token), samples in zip(sampled, plan.samples.tolist(), strict=True) if samples]
        for (row, token), samples in zip(sampled, plan.samples.tolist(), strict=True):
            if samples:
                self.last[row] = token
        assert len(plan.sampling.seeds) == len(tokens)
        return Result(tokens=np.array(tokens, dtype=np.int32))

    def _follow_table(self, plan: Plan) -> None:
        if plan.table is not None:
            at = 0
            t = plan.table
            for row, start, length in zip(t.rows.tolist(), t.starts.tolist(), t.lens.tolist(), strict=True):
                self.table[row, start : start + length] = t.slots[at : at + length]
                at += length
        at = 0
        for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True):
            self.table[row, start : start + length] = plan.slots[at : at + length]
            at += length
