"""The longest time between two tokens, kept for all rows of a run of steps at once."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from weft.arrays import LongArray
from weft.scheduler.times import (
    MAX_STEPS,
    NO_GAP,
    NO_ROWS,
    NUM_PARTS,
    Gap,
    GapSteps,
    Phase,
    Spent,
    SpentOn,
    StepNote,
    StepTotals,
    TokenGaps,
)

NUM_ROWS = 6


def test_numbers_do_not_depend_on_when_somebody_asks() -> None:
    for seed in range(20):
        silent = RowsAtRandom(seed, asks=False)
        asked = RowsAtRandom(seed, asks=True)
        silent.run(120)
        asked.run(120)
        assert silent.found() == asked.found() == silent.expected()


@pytest.mark.parametrize("asks", [False, True])
def test_a_gap_over_several_steps_names_the_longest_of_them(asks: bool) -> None:
    gaps = TokenGaps(2)
    at = np.array([0, 1], dtype=np.intp)
    for row in at.tolist():
        gaps.enter(row, NO_GAP, 0.0)
    gaps.add(StepNote(0, 0.0, 0.0, 0, 2), at)
    steps = [
        StepNote(1, 0.0, 1.0, 0, 2),
        StepNote(2, 1.0, 2.0, 10, 0),
        StepNote(3, 2.0, 5.0, 30, 0),
        StepNote(4, 5.0, 6.0, 0, 2),
        StepNote(5, 6.0, 8.0, 0, 2),
    ]
    for step in steps:
        gaps.add(step, at if step.num_decoding else NO_ROWS)
        if asks:
            gaps.of(0)
    assert gaps.of(0) == gaps.of(1) == Gap(5.0, 6.0, GapSteps(steps[2], 3, 5.0), 8.0)


def test_a_gap_counts_the_steps_since_the_last_token_of_its_own_row() -> None:
    gaps = TokenGaps(2)
    first = np.array([0], dtype=np.intp)
    both = np.array([0, 1], dtype=np.intp)
    gaps.add(StepNote(0, 0.0, 1.0, 4, 0), NO_ROWS)
    gaps.enter(0, NO_GAP, 1.0)
    gaps.add(StepNote(1, 1.0, 2.0, 0, 1), first)
    gaps.add(StepNote(2, 2.5, 4.0, 9, 0), NO_ROWS)
    gaps.enter(1, NO_GAP, 4.0)
    last = StepNote(3, 4.25, 5.0, 0, 2)
    gaps.add(last, both)
    assert gaps.of(0).steps == GapSteps(StepNote(2, 2.5, 4.0, 9, 0), 2, 2.25)
    assert gaps.of(1).steps == GapSteps(last, 1, 0.75)


def test_of_a_gap_with_very_many_steps_the_last_are_counted() -> None:
    gaps = TokenGaps(1)
    gaps.enter(0, NO_GAP, 0.0)
    for number in range(MAX_STEPS + 5):
        gaps.add(StepNote(number, float(number), number + 1.0, 4, 0), NO_ROWS)
    gaps.add(StepNote(99, MAX_STEPS + 5.0, MAX_STEPS + 6.0, 0, 1), np.array([0], dtype=np.intp))
    steps = gaps.of(0).steps
    assert steps is not None
    assert (steps.num, steps.seconds, steps.has_more) == (MAX_STEPS, MAX_STEPS, True)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.PROMPT, {SpentOn.OTHERS: 15.0, SpentOn.BETWEEN: 16.0}),
        (
            Phase.DECODES,
            {SpentOn.DECODE: 1.0, SpentOn.MIXED: 2.0, SpentOn.PROMPTS: 12.0, SpentOn.REST: 16.0},
        ),
    ],
)
def test_each_kind_of_time_since_its_last_step_is_added_to_its_part(
    phase: Phase, expected: dict[SpentOn, float]
) -> None:
    since = StepTotals(1.0, 1.0, 1.0, 1.0, 1.0)
    spent = Spent(0.0, [0.0] * NUM_PARTS, phase=phase, totals=since)
    spent.close(31.0, StepTotals(2.0, 3.0, 5.0, 9.0, 17.0))
    assert {part: spent.seconds[part] for part in SpentOn if spent.seconds[part]} == expected


class RowsAtRandom:
    """Requests enter and leave rows at random, and get tokens. Keeps the times of all tokens."""

    def __init__(self, seed: int, *, asks: bool) -> None:
        self._rng = random.Random(seed)
        self._asks = asks
        self._gaps = TokenGaps(NUM_ROWS)
        self._token_s: dict[int, list[float]] = {}  # by row
        self._at: LongArray = NO_ROWS
        self._now = 0.0

    def run(self, num_steps: int) -> None:
        for step in range(num_steps):
            self._step(step)

    def found(self) -> dict[int, tuple[float, float, float]]:
        """The longest gap of each row, its end, and the time of the last token."""
        gaps = {row: self._gaps.of(row) for row in self._token_s}
        return {row: (gap.seconds, gap.until_s, gap.last_s) for row, gap in gaps.items()}

    def expected(self) -> dict[int, tuple[float, float, float]]:
        found = {}
        for row, times in self._token_s.items():
            longest = (0.0, 0.0)
            for before, after in pairwise(times):
                if after - before > longest[0]:
                    longest = (after - before, after)
            found[row] = (*longest, times[-1])
        return found

    def _step(self, step: int) -> None:
        rng = self._rng
        began_s = self._now
        self._now += rng.choice([0.25, 0.5, 1.0, rng.random()])
        if rng.random() < 0.2:
            row = rng.randrange(NUM_ROWS)
            if self._token_s.pop(row, None) is None:
                self._gaps.enter(row, NO_GAP, self._now)
                self._token_s[row] = [self._now]
            else:
                self._gaps.of(row)
            self._at = np.array(list(self._token_s), dtype=np.intp)
        has_tokens = rng.random() < 0.8
        at = self._at if has_tokens else NO_ROWS
        self._gaps.add(StepNote(step, began_s, self._now, 0, len(at)), at)
        if not has_tokens:
            return
        for row in at.tolist():
            if self._token_s[row][-1] < self._now:
                self._token_s[row].append(self._now)
        if self._asks:
            for row in self._token_s:
                self._gaps.of(row)
