"""What the oracle has of layers with a state: a slot holds the hash of exactly the tokens that it
has seen. Every read is compared with what the K and V of the same sequence say: a slot of another
sequence, a stale snapshot, or one that should have been zeros, fails at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.scheduler.groups import states_of
from weft.arrays import LongArray
from weft.memory.radix.tree import path_up
from weft.plan.step import NO_STATE, Plan
from weft.scheduler.settings import StateSettings

if TYPE_CHECKING:
    from tests.scheduler.cache_check import CacheCheck
    from tests.scheduler.oracle_runner import OracleRunner
    from weft.scheduler.scheduler import Scheduler

NOTHING = -1


class StateOracle:
    def __init__(self, runner: OracleRunner, settings: StateSettings) -> None:
        self._runner = runner
        self.state: LongArray = np.full(settings.num_slots, NOTHING, dtype=np.int64)
        self.in_doubt_until = -1  # the last step that may read what a failed one did not write
        self.num_kept = 0  # copies that were left on the way
        self.num_resumed = 0  # rows that began behind a snapshot

    def follow(self, plan: Plan) -> None:
        states = plan.states
        assert states is not None, "a plan says nothing of layers with a state"
        assert len(states.reads) == len(states.writes) == len(plan.rows)
        assert len(states.kept_rows) == len(states.kept_lens) == len(states.kept_slots)
        written = [*states.writes.tolist(), *states.kept_slots.tolist()]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert min(written) >= 0
        ends = np.cumsum(plan.lens)
        before = self.state.copy()
        for i, (source, own) in enumerate(
            zip(states.reads.tolist(), states.writes.tolist(), strict=True)
        ):
            others = set(written) - {own}
            assert source not in others, "a slot is read by one row and written by another"
            self._check_read(plan, i, source, before)
            self.state[own] = self._runner.state[plan.slots[ends[i] - 1]]
        for i, length, slot in zip(
            states.kept_rows.tolist(),
            states.kept_lens.tolist(),
            states.kept_slots.tolist(),
            strict=True,
        ):
            assert 1 <= length <= plan.lens[i], "a copy is left outside of the row's tokens"
            first = ends[i] - plan.lens[i]
            self.state[slot] = self._runner.state[plan.slots[first + length - 1]]
            self.num_kept += 1

    def _check_read(self, plan: Plan, i: int, source: int, before: LongArray) -> None:
        start = int(plan.starts[i])
        if not start:
            assert source == NO_STATE, "a sequence begins with the state of another"
            return
        assert source != NO_STATE, "a sequence goes on without its state"
        if source != plan.states.writes[i]:  # type: ignore[union-attr]
            self.num_resumed += 1
        last = self._runner.table[plan.rows[i], start - 1]
        if plan.step > self.in_doubt_until:
            assert before[source] == self._runner.state[last], "a state is not that of its sequence"

    def check_snapshots(self, scheduler: Scheduler, chains: CacheCheck) -> None:
        """Compare every snapshot that the cache keeps with the keys that lead to it."""
        snapshots = states_of(scheduler.kv).snapshots
        unwritten: set[int] = set()
        for step in self._runner.pending:
            if step.plan.drafting is not None:
                continue
            assert step.plan.states is not None
            unwritten.update(step.plan.states.writes.tolist())
            unwritten.update(step.plan.states.kept_slots.tolist())
        for node, slot in [*snapshots.ends.items(), *snapshots.spare.items()]:
            if slot in unwritten:
                continue
            state = 0
            for one in reversed(list(path_up(node))):
                state = chains.chain(state, one)[-1]
            assert self.state[slot] == state, "a snapshot has what is not of its sequence"
