"""The longest time between two tokens of each running request, and the step that took most of it.

The numbers are columns by row. A request takes its own with it when it leaves its row.

Most steps give a token to the same rows as the step before. Then the time since their last token is
the same for all of them, so while the rows stay the same only three numbers are kept (`_Run`); they
are written into the columns when the rows change, or when somebody asks.

    rows 0 1 2    | step | step | step |                        one run
    rows 0 1 2 3                       | step | step | step     row 3 has joined: the next run
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.arrays import LongArray

MAX_STEPS = 64  # that are remembered; a gap with more steps in it is explained by the last of them
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


class GapSteps(NamedTuple):
    """The steps that ran between two tokens."""

    longest: StepNote
    num: int  # that are remembered
    seconds: float  # that they took, since the first of the tokens
    has_more: bool = False  # earlier ones are not remembered


class Gap(NamedTuple):
    """The longest time between two tokens of a request."""

    seconds: float = 0.0
    until_s: float = 0.0  # when the second of them came
    steps: GapSteps | None = None
    last_s: float = 0.0  # when its last token came


NO_GAP = Gap()


@dataclass(slots=True)
class _Run:
    """Steps that gave a token to the same rows: the longest time between two of them."""

    at: LongArray  # [n] the rows
    last_s: float  # when their last token came
    seconds: float = 0.0
    until_s: float = 0.0
    steps: GapSteps | None = None


NO_ROWS: LongArray = np.empty(0, dtype=np.intp)


class TokenGaps:
    def __init__(self, num_rows: int) -> None:
        self._token_s = np.zeros(num_rows)  # when the last token came
        self._seconds = np.zeros(num_rows)
        self._until_s = np.zeros(num_rows)
        self._gap_steps = np.empty(num_rows, dtype=object)  # GapSteps
        self._steps: deque[StepNote] = deque(maxlen=MAX_STEPS)
        self._run: _Run | None = None  # what is not in the columns yet
        self.last_step: StepNote | None = None  # that has ended

    def enter(self, row: int, gap: Gap, now: float) -> None:
        """A request begins to decode in this row, or goes on after it was taken back."""
        self._end_run()
        self._token_s[row] = gap.last_s or now
        self._seconds[row] = gap.seconds
        self._until_s[row] = gap.until_s
        self._gap_steps[row] = gap.steps

    def of(self, row: int) -> Gap:
        """What is known of the request in this row, which has decoded."""
        self._end_run()
        return Gap(
            float(self._seconds[row]),
            float(self._until_s[row]),
            self._gap_steps[row],
            float(self._token_s[row]),
        )

    def add(self, step: StepNote, at: LongArray) -> None:
        """A step has ended. The rows `at` [n] have tokens of it. The same array as before: the same
        requests, too."""
        self._steps.append(step)
        self.last_step = step
        if not step.num_decoding:
            return  # the first tokens of requests that have entered their rows in it
        run = self._run
        if run is None or at is not run.at:
            if len(at):
                self._begin_run(step, at)
            return
        ended_s = step.ended_s
        seconds = ended_s - run.last_s
        if seconds > run.seconds:
            run.seconds = seconds
            run.until_s = ended_s
            run.steps = self._steps_since(run.last_s)
        run.last_s = ended_s

    def _begin_run(self, step: StepNote, at: LongArray) -> None:
        """Other rows than in the step before have tokens: the times since their last ones
        differ."""
        self._end_run()
        self._run = _Run(at, step.ended_s)
        last_s = self._token_s.take(at)
        seconds = step.ended_s - last_s
        is_longer = seconds > self._seconds.take(at)
        self._token_s[at] = step.ended_s
        if not is_longer.any():
            return
        self._seconds[at[is_longer]] = seconds[is_longer]
        # Rows are few that did not get their last tokens in the same step.
        for since_s in set(last_s[is_longer].tolist()):
            rows = at[is_longer & (last_s == since_s)]
            self._explain(rows, step.ended_s, self._steps_since(since_s))

    def _end_run(self) -> None:
        run = self._run
        if run is None:
            return
        self._run = None
        self._token_s[run.at] = run.last_s
        is_longer = run.seconds > self._seconds.take(run.at)
        if is_longer.any():
            rows = run.at[is_longer]
            self._seconds[rows] = run.seconds
            self._explain(rows, run.until_s, run.steps)

    def _explain(self, rows: LongArray, until_s: float, steps: GapSteps | None) -> None:
        self._until_s[rows] = until_s
        for row in rows.tolist():  # one by one: numpy would spread the tuple over the rows
            self._gap_steps[row] = steps

    def _steps_since(self, since_s: float) -> GapSteps:
        """The steps that ended after this moment, of which there is one."""
        longest = self._steps[-1]
        num = 0
        seconds = 0.0
        for one in reversed(self._steps):
            if one.ended_s <= since_s:
                return GapSteps(longest, num, seconds)
            num += 1
            seconds += one.ended_s - max(one.began_s, since_s)
            if one.ended_s - one.began_s > longest.ended_s - longest.began_s:
                longest = one
        return GapSteps(longest, num, seconds, has_more=num == MAX_STEPS)
