"""What the oracle has of layers with windows: each of their slots stores what the slot of the same
token stores in all other layers, so that a slot which belongs to another token, or was given away
too early, is seen when it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.scheduler.groups import windows_of
from weft.arrays import IntArray, LongArray
from weft.memory.allocator import slots_of
from weft.memory.radix.tree import path_up
from weft.plan.step import Plan, TableWrites
from weft.scheduler.settings import WindowSettings

if TYPE_CHECKING:
    from tests.scheduler.cache_check import CacheCheck
    from tests.scheduler.oracle_runner import OracleRunner
    from weft.scheduler.scheduler import Scheduler

NOTHING = -1


class WindowOracle:
    def __init__(self, runner: OracleRunner, settings: WindowSettings, page_size: int) -> None:
        self._runner = runner
        self._sight = settings.sight
        self._page_size = page_size
        self.state: LongArray = np.full(settings.num_pages * page_size, NOTHING, dtype=np.int64)
        self.table: IntArray = np.zeros((runner.num_rows, runner.max_len), dtype=np.int32)
        self.in_doubt_until = -1  # the last step that may read what a failed one did not write
        self.most_read = 0  # slots, by one request in one step

    def follow(self, plan: Plan) -> None:
        assert plan.window is not None, "a plan says nothing of layers with windows"
        slots = plan.window.slots
        assert len(slots) == len(plan.slots)
        assert len(set(slots.tolist())) == len(slots), "two tokens of one step share a slot"
        if plan.window.table is not None:
            self._follow_writes(plan.window.table)
        self._follow_slots(plan)
        # In a layer all tokens of a step are stored before any is read.
        self.state[slots] = self._runner.state[plan.slots]
        for row, start, length in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True
        ):
            first = self._sight.first(start)
            read = self.table[row, first : start + length]
            seen = self._runner.state[self._runner.table[row, first : start + length]]
            self.most_read = max(self.most_read, len(read))
            if plan.step > self.in_doubt_until:
                assert (self.state[read] == seen).all(), "a window has what is not of its sequence"

    def check_tails(self, scheduler: Scheduler, chains: CacheCheck) -> None:
        """Compare every tail that the cache keeps with the keys that lead to it."""
        windows = windows_of(scheduler.kv)
        pending = [step.plan.window.slots for step in self._runner.pending if step.plan.window]
        unwritten = np.concatenate([np.empty(0, dtype=np.int32), *pending])
        for node, tail in windows.tails.all():
            expected = self._states_of(node, chains)
            assert len(expected) == tail.end * self._page_size
            at = slots_of(tail.pages, self._page_size)
            is_computed = ~np.isin(at, unwritten)
            wanted = np.array(expected[tail.first * self._page_size :], dtype=np.int64)
            assert (self.state[at][is_computed] == wanted[is_computed]).all(), (
                "a tail has what is not of its sequence"
            )

    @staticmethod
    def _states_of(node: object, chains: CacheCheck) -> list[int]:
        """The states behind each token of a cached sequence."""
        states: list[int] = []
        for one in reversed(list(path_up(node))):  # type: ignore[arg-type]
            states += chains.chain(states[-1] if states else 0, one)
        return states

    def _follow_writes(self, writes: TableWrites) -> None:
        at = 0
        for row, start, length in zip(
            writes.rows.tolist(), writes.starts.tolist(), writes.lens.tolist(), strict=True
        ):
            self.table[row, start : start + length] = writes.slots[at : at + length]
            at += length

    def _follow_slots(self, plan: Plan) -> None:
        assert plan.window is not None
        at = 0
        for row, start, length in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True
        ):
            self.table[row, start : start + length] = plan.window.slots[at : at + length]
            at += length
