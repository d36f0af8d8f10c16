"""Where the time of a request went in the engine, and the longest time between two of its tokens.

Seconds by what they were spent on (`Spent`). Their sum is all of the request's time, because every
moment is added to exactly one part.

    arrived  admitted  its first piece  its next piece   first token      second token        end
       |  WAIT  |  AHEAD  | OWN + SHARED | OTHERS, BETWEEN |  FIRST_DECODE  |  DECODE, PROMPTS  |

Steps of the device follow one another. The time up to a result is the step's, or lies between two
steps. `StepClock` adds it up by kind, so a span of a request that lasted a thousand steps is the
difference of two readings. `TokenGaps` follows the tokens of running rows. None of them knows
requests or batches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from weft.arrays import LongArray

MAX_STEPS = 64  # that are remembered; a gap with more steps in it is explained by the last of them
MAX_NAMED = 3  # requests of a step whose prompts it computed


# What the time was spent on


class SpentOn(IntEnum):
    """What the time of a request was spent on; the index of its seconds in `Spent.seconds`."""

    WAIT = 0  # in the queue, until it was first admitted
    AHEAD = 1  # admitted, while the device finished the step before
    OWN = 2  # steps with a piece of its prompt: the share of its own tokens
    SHARED = 3  # the rest of these steps, for tokens of others
    ENCODE = 4  # the encoder, in these steps
    OTHERS = 5  # steps without a piece of its prompt, between its pieces
    BETWEEN = 6  # between steps, before its first token
    FIRST_DECODE = 7  # the step in which it first decoded
    DECODE = 8  # later ones in which it got tokens, and no prompt was computed
    MIXED = 9  # later ones in which it got tokens, with prompts of others
    PROMPTS = 10  # steps for prompts of others, in which it got none
    REST = 11  # between steps, after its first token
    WAIT_AGAIN = 12  # in the queue, after it was retracted
    AGAIN = 13  # its tokens were computed again


NUM_PARTS = len(SpentOn)  # once, because an enumeration counts its members slowly
# The indices that steps use: Python 3.11 looks up a member in its class ten times as slowly.
(
    ON_WAIT,
    ON_AHEAD,
    ON_OWN,
    ON_SHARED,
    ON_ENCODE,
    ON_OTHERS,
    ON_BETWEEN,
    ON_FIRST_DECODE,
    ON_DECODE,
    ON_MIXED,
    ON_PROMPTS,
    ON_REST,
    ON_WAIT_AGAIN,
    ON_AGAIN,
) = map(int, SpentOn)


class StepTotals(NamedTuple):
    """Seconds since the start, by what the device did. All time up to one moment is in them."""

    decode_s: float = 0.0  # decode steps
    mixed_s: float = 0.0  # steps with prompts and decoding requests
    prompts_s: float = 0.0  # steps with prompts alone
    encode_s: float = 0.0  # the encoder, in any step
    rest_s: float = 0.0  # no step ran


NO_TIME = StepTotals()


class StepSpan(NamedTuple):
    """The time of one step on the device."""

    began_s: float
    ended_s: float
    encoder_s: float  # of this, the encoder's
    num_tokens: int  # with prompts; 0 for a step without
    before: StepTotals  # when it began
    after: StepTotals


class StepClock:
    """Adds up the time of steps. Steps end in order, and none begins before the last one has
    ended."""

    def __init__(self) -> None:
        self.known_s: float | None = None  # the end of the last step; None before the first
        # The numbers of `totals`.
        self._decode_s = 0.0
        self._mixed_s = 0.0
        self._prompts_s = 0.0
        self._encode_s = 0.0
        self._rest_s = 0.0

    @property
    def totals(self) -> StepTotals:
        return StepTotals(
            self._decode_s, self._mixed_s, self._prompts_s, self._encode_s, self._rest_s
        )

    def decoded(self, began_s: float, ended_s: float, encoder_s: float) -> None:
        """A step without prompts has ended."""
        if self.known_s is not None:
            self._rest_s += began_s - self.known_s
        self._decode_s += ended_s - began_s - encoder_s
        self._encode_s += encoder_s
        self.known_s = ended_s

    def prefilled(
        self,
        began_s: float,
        ended_s: float,
        encoder_s: float,
        num_tokens: int,
        *,
        has_decode: bool,
    ) -> StepSpan:
        """A step with prompts has ended."""
        if self.known_s is not None:
            self._rest_s += began_s - self.known_s
        before = self.totals
        busy_s = ended_s - began_s - encoder_s
        if has_decode:
            self._mixed_s += busy_s
        else:
            self._prompts_s += busy_s
        self._encode_s += encoder_s
        self.known_s = ended_s
        return StepSpan(began_s, ended_s, encoder_s, num_tokens, before, self.totals)

    def at(self, now: float) -> StepTotals:
        """The totals at a moment after the last result, if no step has begun since."""
        totals = self.totals
        if self.known_s is None or now == self.known_s:
            return totals
        return totals._replace(rest_s=totals.rest_s + now - self.known_s)


NEVER = -1.0


class Phase(IntEnum):
    WAITS = 0
    PROMPT = 1  # its prompt is computed for the first time
    AGAIN = 2  # its tokens are computed again
    DECODES = 3


WAITS, PROMPT, AGAIN, DECODES = Phase


class Retractions(NamedTuple):
    """How often a request was taken back, and what that cost."""

    num: int
    recomputed_tokens: int  # computed again after a retraction
    refound_tokens: int  # still cached after a retraction


NO_RETRACTIONS = Retractions(0, 0, 0)  # of nearly all requests


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
class Spent:
    """The time of one request so far. All before `since_s` is in `seconds`."""

    since_s: float
    seconds: list[float]  # by `SpentOn`
    step_before: StepNote | None = None  # the step that ended last before it arrived
    phase: Phase = WAITS
    admitted_s: float = NEVER  # when it first got a row
    # The totals at `since_s`, while its tokens are computed; None: its first piece has not begun.
    totals: StepTotals | None = None
    retractions: Retractions = NO_RETRACTIONS
    gap: Gap = NO_GAP  # the longest one before it left its last row

    def admitted(self, now: float, *, has_tokens: bool) -> None:
        """It has got a row. `has_tokens`: it had its first token before."""
        if self.admitted_s == NEVER:
            self.seconds[ON_WAIT] += now - self.since_s
            self.admitted_s = now
        else:
            self.seconds[ON_WAIT_AGAIN] += now - self.since_s
        self.since_s = now
        self.phase = AGAIN if has_tokens else PROMPT
        self.totals = None

    def computed(self, step: StepSpan, num_own: int, *, is_last: bool) -> None:
        """A step has computed `num_own` of its tokens; `is_last`: with them, all that it had to
        compute before it decodes. Of the steps in which it decodes, only the first is reported."""
        busy_s = step.ended_s - step.began_s - step.encoder_s
        if self.phase is AGAIN:
            if not is_last:
                return
            self.seconds[ON_AGAIN] += step.ended_s - self.since_s
        elif self.phase is DECODES:
            self.close(step.began_s, step.before)
            self.seconds[ON_FIRST_DECODE] += busy_s
            self.seconds[ON_PROMPTS] += step.encoder_s
        else:
            self.close(step.began_s, step.before)
            own_s = busy_s * num_own / step.num_tokens
            self.seconds[ON_OWN] += own_s
            self.seconds[ON_SHARED] += busy_s - own_s
            self.seconds[ON_ENCODE] += step.encoder_s
        self.since_s = step.ended_s
        self.totals = step.after
        if is_last:
            self.phase = DECODES

    def close(self, now: float, totals: StepTotals) -> None:
        """Add the time up to `now`, when the clock has these totals."""
        seconds = self.seconds
        before = self.totals
        if self.phase is WAITS:
            was_admitted = self.admitted_s != NEVER
            seconds[ON_WAIT_AGAIN if was_admitted else ON_WAIT] += now - self.since_s
        elif self.phase is AGAIN:
            seconds[ON_AGAIN] += now - self.since_s
        elif before is None:
            seconds[ON_AHEAD] += now - self.since_s
        elif self.phase is PROMPT:
            seconds[ON_BETWEEN] += totals.rest_s - before.rest_s
            seconds[ON_OTHERS] += totals.decode_s - before.decode_s
            seconds[ON_OTHERS] += totals.mixed_s - before.mixed_s
            seconds[ON_OTHERS] += totals.prompts_s - before.prompts_s
            seconds[ON_OTHERS] += totals.encode_s - before.encode_s
        else:
            seconds[ON_DECODE] += totals.decode_s - before.decode_s
            seconds[ON_MIXED] += totals.mixed_s - before.mixed_s
            prompts_s = totals.prompts_s - before.prompts_s
            seconds[ON_PROMPTS] += prompts_s + totals.encode_s - before.encode_s
            seconds[ON_REST] += totals.rest_s - before.rest_s
        self.since_s = now
        self.totals = totals

    def retracted(self, now: float, totals: StepTotals) -> None:
        """It has lost its row and waits."""
        self.close(now, totals)
        self.phase = WAITS
        self.retractions = self.retractions._replace(num=self.retractions.num + 1)

    def found_again(self, found: int, fill_len: int) -> None:
        """It runs again after a retraction: of its `fill_len` tokens, `found` are still cached."""
        before = self.retractions
        self.retractions = before._replace(
            recomputed_tokens=before.recomputed_tokens + fill_len - found,
            refound_tokens=before.refound_tokens + found,
        )


# The longest time between two tokens


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
        if self._run is not None:
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
