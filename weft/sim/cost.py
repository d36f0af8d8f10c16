"""A Runner that computes nothing and only counts time, on a clock that it advances itself.

The cost model (`weft/scheduler/pace/step_cost.py`) gives the duration of a step from its load.
Steps run one after the other, as on a device: a step that is launched while another runs begins
when the other ends.

Only this module knows the length of a request's output. The runner identifies the request of a row
by its sampling seed: the simulation uses the number of each request as its seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.config.options import SettingsError, did_you_mean
from weft.plan.device import NO_DEVICE, DeviceRequest, Pending
from weft.plan.runs import HostRuns, has_runs
from weft.plan.step import ForwardMode, Plan, Result
from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.sim.encoder import ENCODER_PRESETS, EncoderCost, SimulatedEncoder
from weft.sim.speed import MachineSpeed
from weft.sim.trace import EOS, FILLER
from weft.sim.uniform import RanStep

# cpu: Qwen3-0.6B in bfloat16 on 2 Zen 4 cores (a prompt of 512 in 1.2 s, 32 requests of 940 tokens
# in 0.22 s per step). gpu: an 8 B model in bfloat16 on one H100: 16 GB of weights and 131 kB of KV
# per token at 3 TB/s, 0.5 PFLOP/s.
PRESETS = {
    "cpu": CostModel(step_s=0.05, token_s=0.0024, context_s=1.4e-6),
    "gpu": CostModel(step_s=0.006, token_s=3.2e-5, context_s=4.4e-8),
}


def read_cost(text: str) -> CostModel:
    """Read a preset's name, or a,b,c[,d]: seconds per step, token, token of context and sample.
    Raises SettingsError."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        values = [float(word) for word in text.split(",")]
        is_complete = len(values) in (3, 4)
        # `not sum > 0` is also true of NaN.
        if not is_complete or min(values) < 0 or not sum(values) > 0:
            raise ValueError(text)
    except ValueError as exc:
        hint = did_you_mean(text, PRESETS)
        names = ", ".join(PRESETS)
        raise SettingsError(
            f"--cost is {text!r}; {names} or seconds a,b,c[,d] are expected{hint}"
        ) from exc
    return CostModel(*values)


class VirtualClock:
    """A clock that advances only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time_s: float) -> None:
        self.now = max(self.now, time_s)


class StepCost(Protocol):
    """The usual duration of steps: a `CostModel`."""

    def seconds(self, load: StepLoad) -> float: ...


class TrueLengths:
    """The last position of each request's output, by the request's number; and the output's tokens
    if they are known: then drafts match where they matched in the recording."""

    def __init__(self) -> None:
        self._last: IntArray = np.full(1_024, -1, dtype=np.int32)
        # position of the first token, and the tokens
        self._known: dict[int, tuple[int, IntArray]] = {}
        self._guesses: dict[int, bytes] = {}

    def add(
        self, number: int, last_position: int, output: bytes = b"", guesses: bytes = b""
    ) -> None:
        """Set the position of the last token of request `number`. `output`: its tokens, int32
        each. `guesses`: what becomes of a guess of each of them (`guesses.py`)."""
        if guesses:
            self._guesses[number] = guesses
        while number >= len(self._last):
            more = np.full(len(self._last), -1, dtype=np.int32)
            self._last = np.concatenate([self._last, more])
        self._last[number] = last_position
        if output:
            tokens = np.frombuffer(output, dtype=np.int32)
            # Only the last token may end the output: the last one may be any token that ended it.
            tokens = np.where(tokens == EOS, np.int32(FILLER), tokens)
            self._known[number] = (last_position + 1 - len(tokens), tokens)

    def forget(self, number: int) -> None:
        """This request has ended: nothing more is asked about its tokens that matters."""
        self._known.pop(number, None)
        self._guesses.pop(number, None)

    def guesses(self, number: int) -> bytes:
        """What becomes of guesses of this request's tokens; empty: unknown."""
        return self._guesses.get(number, b"")

    def reached(self, numbers: LongArray, positions: IntArray) -> BoolArray:
        """[n] whether the token at this position is the last of its request."""
        reached: BoolArray = self._last[numbers] == positions
        return reached

    def steps_to_end(self, numbers: LongArray, positions: IntArray) -> int:
        """How many tokens all of these requests get, from these positions on, until the first of
        them gets its last one. Requests without a known length have no end, and neither have those
        that go on after it."""
        left = self._last[numbers] - positions
        left = left[left >= 0]
        return int(left.min()) + 1 if len(left) else NO_END

    def ahead(self, numbers: LongArray, positions: IntArray, num_steps: int) -> IntArray:
        """[num_steps, n] the tokens from these positions on, up to the first end."""
        tokens: IntArray = np.full((num_steps, len(numbers)), FILLER, dtype=np.int32)
        if self._known:
            self._fill_known(tokens, numbers, positions)
        tokens[-1, self.reached(numbers, positions + num_steps - 1)] = EOS
        return tokens

    def _fill_known(self, tokens: IntArray, numbers: LongArray, positions: IntArray) -> None:
        pairs = zip(numbers.tolist(), positions.tolist(), strict=True)
        for column, (number, position) in enumerate(pairs):
            start, known = self._known.get(number, NOTHING_KNOWN)
            begin = max(position, start)
            some = known[begin - start : position - start + len(tokens)]
            tokens[begin - position : begin - position + len(some), column] = some

    def tokens(self, numbers: LongArray, positions: IntArray) -> IntArray:
        """[n] the tokens at these positions of these requests."""
        ends = self.reached(numbers, positions)
        tokens: IntArray = np.where(ends, np.int32(EOS), np.int32(FILLER))
        if not self._known:
            return tokens
        for index, (number, position) in enumerate(
            zip(numbers.tolist(), positions.tolist(), strict=True)
        ):
            start, known = self._known.get(number, NOTHING_KNOWN)
            if start <= position < start + len(known) and not ends[index]:
                tokens[index] = known[position - start]
        return tokens


NOTHING_KNOWN = (0, np.zeros(0, dtype=np.int32))
NO_END = 1 << 30


def decode_rows_of(plan: Plan) -> int:
    """Rows of a step with decode rows, including rows of prompts in the same step; 0 if the step
    has only prompts."""
    if plan.mode in (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL):
        return 0
    return len(plan.rows)


class StepMeter:
    """Sums over the steps that ran."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_decodes = 0  # steps with decode rows
        self.num_decode_rows = 0  # sum over these steps
        self.decode_s = 0.0
        self.row_s = 0.0  # rows x seconds, of these steps

    def add(self, decode_rows: int, seconds: float) -> None:
        """Count a step of `seconds`; `decode_rows` comes from `decode_rows_of`."""
        self.num_steps += 1
        self.busy_s += seconds
        if decode_rows:
            self.num_decodes += 1
            self.num_decode_rows += decode_rows
            self.decode_s += seconds
            self.row_s += decode_rows * seconds

    @classmethod
    def of_all(cls, meters: Sequence[StepMeter]) -> StepMeter:
        """The steps of several devices together. `busy_s` is the mean over the devices."""
        total = cls()
        for meter in meters:
            total.num_steps += meter.num_steps
            total.busy_s += meter.busy_s / len(meters)
            total.num_decodes += meter.num_decodes
            total.num_decode_rows += meter.num_decode_rows
            total.decode_s += meter.decode_s
            total.row_s += meter.row_s
        return total

    @property
    def mean_rows(self) -> float:
        """Mean number of rows in decode steps, weighted by time."""
        if not self.decode_s:
            return 0.0
        return self.row_s / self.decode_s


class SimulatedStep:
    """A step with a known end time."""

    __slots__ = ("_clock", "_end_s", "_result")

    def __init__(self, clock: VirtualClock, end_s: float, result: Result) -> None:
        self._clock = clock
        self._end_s = end_s
        self._result = result

    def result(self) -> Result:
        self._clock.wait_until(self._end_s)
        return self._result

    def done(self) -> bool:
        return self._clock.now >= self._end_s


class CostRunner:
    """Samples the known output of a request, else `FILLER`, and `EOS` as its last token. `speed` is
    that of the machine; None: always the usual speed."""

    def __init__(
        self,
        cost: StepCost,
        clock: VirtualClock,
        lengths: TrueLengths,
        speed: MachineSpeed | None = None,
        encoder_cost: EncoderCost = ENCODER_PRESETS["gpu"],
    ) -> None:
        self.meter = StepMeter()
        self.encoder = SimulatedEncoder(encoder_cost)
        self._cost = cost
        self._speed = speed
        self._clock = clock
        self._lengths = lengths
        self._free_s = 0.0  # end of the last launched step
        self._runs = HostRuns()

    def launch(self, plan: Plan) -> SimulatedStep:
        encoder_s, encoded = self.encoder.step(plan)
        usual_s = self._cost.seconds(StepLoad.of(plan)) + encoder_s
        seconds = self._run(usual_s, decode_rows_of(plan))
        if encoder_s:
            encoder_s *= seconds / usual_s
        result = Result(
            tokens=self._sampled(plan),
            encoded=encoded,
            encoder_s=encoder_s,
        )
        return SimulatedStep(self._clock, self._free_s, result)

    def foresee(self, loads: Iterable[StepLoad], until_s: float) -> list[RanStep]:
        """When steps with these loads would run, one after the other and nothing beside them: those
        that begin before `until_s`. None of them runs."""
        began_s = self._clock.now  # the device is idle
        steps: list[RanStep] = []
        for load in loads:
            if began_s >= until_s:
                break
            seconds = self._seconds(self._cost.seconds(load), began_s)
            ended_s = began_s + seconds
            steps.append(RanStep(began_s, ended_s, seconds))
            began_s = ended_s
        return steps

    def decode(self, num_rows: int, steps: Sequence[RanStep]) -> None:
        """Run foreseen steps, in which rows decode, and wait for the end of the last."""
        for step in steps:
            self.meter.add(num_rows, step.seconds)
        self._free_s = steps[-1].ended_s
        self._clock.wait_until(self._free_s)

    def control(self, request: DeviceRequest) -> Pending:
        return NO_DEVICE

    def _run(self, usual_s: float, decode_rows: int) -> float:
        """Let the device run a step that usually takes this long. Returns how long it takes."""
        # A step begins when the previous one ends, or now if the device is idle.
        begins_s = max(self._free_s, self._clock.now)
        seconds = self._seconds(usual_s, begins_s)
        self.meter.add(decode_rows, seconds)
        self._free_s = begins_s + seconds
        return seconds

    def _seconds(self, usual_s: float, begins_s: float) -> float:
        """How long a step takes that begins at this time and usually takes `usual_s`."""
        if self._speed is None:
            return usual_s
        return self._speed.seconds(usual_s, begins_s)

    def _sampled(self, plan: Plan) -> IntArray:
        """[S] With overlap, the device itself finds how many earlier draft tokens count."""
        closed = self._runs.closed(plan)
        draws = closed.sampling
        tokens = self._lengths.tokens(draws.seeds, draws.positions)
        if has_runs(plan):
            self._runs.settle(plan, closed, tokens)
        return tokens
