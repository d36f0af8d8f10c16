"""Where the time of a request went in the engine: seconds by what they were spent on. Their sum is
its whole time, because every moment is added to exactly one part.

    arrived    admitted    its first piece    its next piece    first token        end
       |   WAIT   |   AHEAD   | OWN + SHARED | OTHERS, BETWEEN | ... | DECODE, PROMPTS, REST |

Steps of the device follow one another. The time up to a result is the step's, or lies between two
steps. `StepClock` adds it up by kind, so a span of a request that lasted a thousand steps is the
difference of two readings. It knows neither requests nor batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Part(IntEnum):
    """What the time of a request was spent on; the index of its seconds in `Spent.seconds`."""

    WAIT = 0  # in the queue, until it was first admitted
    AHEAD = 1  # admitted, while the device finished the step before
    OWN = 2  # steps with a piece of its prompt: the share of its own tokens
    SHARED = 3  # the rest of these steps, for tokens of others
    ENCODE = 4  # the encoder, in these steps
    OTHERS = 5  # steps without a piece of its prompt, between its pieces
    BETWEEN = 6  # between steps, before its first token
    DECODE = 7  # steps in which it got tokens, and no prompt was computed
    MIXED = 8  # steps in which it got tokens, with prompts of others
    PROMPTS = 9  # steps for prompts of others, in which it got none
    REST = 10  # between steps, after its first token
    WAIT_AGAIN = 11  # in the queue, after it was retracted
    AGAIN = 12  # its tokens were computed again


class StepTotals(NamedTuple):
    """Seconds since the start, by what the device did. All time up to one moment is in them."""

    decode_s: float = 0.0  # decode steps
    mixed_s: float = 0.0  # steps with prompts and decoding requests
    prompts_s: float = 0.0  # steps with prompts alone
    encode_s: float = 0.0  # the encoder, in any step
    rest_s: float = 0.0  # no step ran


class StepSpan(NamedTuple):
    """The time of one step on the device."""

    began_s: float
    ended_s: float
    encoder_s: float  # of this, the encoder's
    num_tokens: int
    before: StepTotals  # when it began
    after: StepTotals


class StepClock:
    """Adds up the time of steps."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.known_s: float | None = None  # the end of the last step; None before the first

    def add(
        self,
        began_s: float,
        ended_s: float,
        encoder_s: float,
        num_tokens: int,
        *,
        has_prompts: bool,
        has_decode: bool,
    ) -> StepSpan:
        """A step has ended. Steps end in order, and none begins before the last one has ended."""
        before = self.totals
        if self.known_s is not None:
            before = before._replace(rest_s=before.rest_s + began_s - self.known_s)
        decode_s, mixed_s, prompts_s, encode_s, rest_s = before
        busy_s = ended_s - began_s - encoder_s
        if not has_prompts:
            decode_s += busy_s
        elif has_decode:
            mixed_s += busy_s
        else:
            prompts_s += busy_s
        self.totals = StepTotals(decode_s, mixed_s, prompts_s, encode_s + encoder_s, rest_s)
        self.known_s = ended_s
        return StepSpan(began_s, ended_s, encoder_s, num_tokens, before, self.totals)

    def at(self, now: float) -> StepTotals:
        """The totals at a moment after the last result, if no step has begun since."""
        if self.known_s is None:
            return self.totals
        return self.totals._replace(rest_s=self.totals.rest_s + now - self.known_s)


class Phase(IntEnum):
    WAITS = 0
    PROMPT = 1  # its prompt is computed for the first time
    AGAIN = 2  # its tokens are computed again
    DECODES = 3


@dataclass(slots=True)
class Spent:
    """The time of one request so far. All before `since_s` is in `seconds`."""

    since_s: float
    phase: Phase = Phase.WAITS
    was_admitted: bool = False
    # The totals at `since_s`, while its tokens are computed; None: its first piece has not begun.
    totals: StepTotals | None = None
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Part))  # by `Part`

    def admitted(self, now: float, *, has_tokens: bool) -> None:
        """It has got a row. `has_tokens`: it had its first token before."""
        self.seconds[Part.WAIT_AGAIN if self.was_admitted else Part.WAIT] += now - self.since_s
        self.since_s = now
        self.phase = Phase.AGAIN if has_tokens else Phase.PROMPT
        self.was_admitted = True
        self.totals = None

    def computed(self, step: StepSpan, num_own: int, *, is_whole: bool) -> None:
        """A step has computed `num_own` of its tokens; `is_whole`: with them, all that it had to
        compute before it decodes."""
        if self.phase is Phase.AGAIN:
            if is_whole:
                self.seconds[Part.AGAIN] += step.ended_s - self.since_s
                self._begin(step, Phase.DECODES)
            return
        self.close(step.began_s, step.before)
        busy_s = step.ended_s - step.began_s - step.encoder_s
        own_s = busy_s * num_own / step.num_tokens
        self.seconds[Part.OWN] += own_s
        self.seconds[Part.SHARED] += busy_s - own_s
        self.seconds[Part.ENCODE] += step.encoder_s
        self._begin(step, Phase.DECODES if is_whole else Phase.PROMPT)

    def _begin(self, step: StepSpan, phase: Phase) -> None:
        self.since_s = step.ended_s
        self.totals = step.after
        self.phase = phase

    def close(self, now: float, totals: StepTotals) -> None:
        """Add the time up to `now`, when the clock has these totals."""
        seconds = self.seconds
        before = self.totals
        if self.phase is Phase.WAITS:
            seconds[Part.WAIT_AGAIN if self.was_admitted else Part.WAIT] += now - self.since_s
        elif self.phase is Phase.AGAIN:
            seconds[Part.AGAIN] += now - self.since_s
        elif before is None:
            seconds[Part.AHEAD] += now - self.since_s
        elif self.phase is Phase.PROMPT:
            seconds[Part.BETWEEN] += totals.rest_s - before.rest_s
            seconds[Part.OTHERS] += totals.decode_s - before.decode_s
            seconds[Part.OTHERS] += totals.mixed_s - before.mixed_s
            seconds[Part.OTHERS] += totals.prompts_s - before.prompts_s
            seconds[Part.OTHERS] += totals.encode_s - before.encode_s
        else:
            seconds[Part.DECODE] += totals.decode_s - before.decode_s
            seconds[Part.MIXED] += totals.mixed_s - before.mixed_s
            prompts_s = totals.prompts_s - before.prompts_s
            seconds[Part.PROMPTS] += prompts_s + totals.encode_s - before.encode_s
            seconds[Part.REST] += totals.rest_s - before.rest_s
        self.since_s = now
        self.totals = totals

    def retracted(self, now: float, totals: StepTotals) -> None:
        """It has lost its row and waits."""
        self.close(now, totals)
        self.phase = Phase.WAITS
