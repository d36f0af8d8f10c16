"""The longest time between two tokens of each running request, and the step that took most of it.

The numbers are columns by row, written for all rows of a step at once. A request takes its own with
it when it leaves its row.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from weft.arrays import LongArray

MAX_STEPS = 64  # that are remembered; a gap that more steps lie in is explained by the last of them
MAX_NAMED = 3  # requests of a step whose prompts it computed


class StepNote(NamedTuple):
    """What a step did."""

    step: int
    began_s: float
    ended_s: float
    prompt_tokens: int
    num_decoding: int  # rows that decoded in it
    ids: tuple[int, ...] = ()  # the first requests whose prompts it computed
    num_prompts: int = 0


class Gap(NamedTuple):
    """The longest time between two tokens of a request."""

    seconds: float = 0.0
    until_s: float = 0.0  # when the second of them came
    longest: StepNote | None = None  # the longest step in it
    last_s: float = 0.0  # when its last token came


NO_GAP = Gap()


class TokenGaps:
    def __init__(self, num_rows: int) -> None:
        self._token_s = np.zeros(num_rows)  # when the last token came
        self._seconds = np.zeros(num_rows)
        self._until_s = np.zeros(num_rows)
        self._longest = np.empty(num_rows, dtype=object)  # StepNote
        self._steps: deque[StepNote] = deque(maxlen=MAX_STEPS)

    def enter(self, row: int, gap: Gap, now: float) -> None:
        """A request begins to decode in this row, or goes on after it was taken back."""
        self._token_s[row] = gap.last_s or now
        self._seconds[row] = gap.seconds
        self._until_s[row] = gap.until_s
        self._longest[row] = gap.longest

    def leave(self, row: int) -> Gap:
        """What is known of the request in this row, which has decoded."""
        return Gap(
            float(self._seconds[row]),
            float(self._until_s[row]),
            self._longest[row],
            float(self._token_s[row]),
        )

    def add(self, step: StepNote, at: LongArray) -> None:
        """A step has ended. The rows `at` [n] have tokens of it."""
        self._steps.append(step)
        if not len(at):
            return
        seconds = step.ended_s - self._token_s.take(at)
        is_longer = seconds > self._seconds.take(at)
        self._token_s[at] = step.ended_s
        if not is_longer.any():
            return
        rows = at[is_longer]
        self._seconds[rows] = seconds[is_longer]
        self._until_s[rows] = step.ended_s
        since_s = step.ended_s - float(seconds[is_longer].max())
        inside = [one for one in self._steps if one.ended_s > since_s]
        longest = max(inside, key=_duration)
        for row in rows.tolist():  # one by one: numpy would spread the tuple over the rows
            self._longest[row] = longest


def _duration(step: StepNote) -> float:
    return step.ended_s - step.began_s
