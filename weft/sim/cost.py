"""A Runner that computes nothing and only counts time, on a clock that it moves itself.

A step takes a + b · tokens + c · context + d · samples seconds: `context` is the sum of the KV lengths that attention
reads, `samples` how many tokens are chosen. Steps run one after the other, as on a device: one that is launched while
another runs begins when that one ends.

How long a request's output will be is known here and nowhere else. The runner gets to know which request a row belongs
to by its sampling seed: the simulation gives each request its own number as seed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.plan.device import NO_DEVICE, DeviceRequest, Pending
from weft.plan.step import ForwardMode, Plan, Result
from weft.sim.trace import EOS, FILLER


class Cost(NamedTuple):
    """Seconds of a step."""

    step_s: float  # a: whatever is in it
    token_s: float  # b
    context_s: float  # c
    sample_s: float = 0.0  # d

    def seconds(self, load: Load) -> float:
        tokens, context, samples = load.num_tokens, load.context, load.num_samples
        return (
            self.step_s + self.token_s * tokens + self.context_s * context + self.sample_s * samples
        )


# cpu: Qwen3-0.6B in bfloat16 on 2 Zen 4 cores (a prompt of 512 in 1.2 s, 32 requests of 940 tokens in 0.22 s a step).
# gpu: an 8 B model in bfloat16 on one H100: 16 GB of weights and 131 kB of KV a token at 3 TB/s, 0.5 PFLOP/s.
PRESETS = {"cpu": Cost(0.05, 0.0024, 1.4e-6), "gpu": Cost(0.006, 3.2e-5, 4.4e-8)}


class Load(NamedTuple):
    """What a step has to do."""

    num_rows: int
    num_tokens: int
    context: int  # sum of the KV lengths that attention reads, in tokens
    num_samples: int
    decodes: bool  # whether rows that decode are in it

    @classmethod
    def of(cls, plan: Plan) -> Load:
        tokens = plan.num_tokens
        context = int(plan.starts.sum()) + tokens
        return cls(
            len(plan.rows),
            tokens,
            context,
            len(plan.sampling.seeds),
            plan.mode is not ForwardMode.EXTEND,
        )


class VirtualClock:
    """Time that passes only when it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time_s: float) -> None:
        self.now = max(self.now, time_s)


class TrueLengths:
    """Where each request's output will end, by the request's number."""

    def __init__(self) -> None:
        self._last: IntArray = np.full(1_024, -1, dtype=np.int32)

    def add(self, number: int, last_position: int) -> None:
        """The last token of the output of request `number` will stand at this position."""
        while number >= len(self._last):
            self._last = np.concatenate([self._last, np.full(len(self._last), -1, dtype=np.int32)])
        self._last[number] = last_position

    def reached(self, numbers: LongArray, positions: IntArray) -> BoolArray:
        """[n] whether the token at this position is its request's last."""
        reached: BoolArray = self._last[numbers] == positions
        return reached


class Meter:
    """Adds up what ran. A decode step is one in which rows decode, alone or beside prompts."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_decodes = 0
        self.num_decode_rows = 0  # of all decode steps together
        self.decode_s = 0.0
        self.row_s = 0.0  # rows x seconds, of decode steps

    def add(self, load: Load, seconds: float) -> None:
        self.num_steps += 1
        self.busy_s += seconds
        if load.decodes:
            self.num_decodes += 1
            self.num_decode_rows += load.num_rows
            self.decode_s += seconds
            self.row_s += load.num_rows * seconds

    @property
    def mean_rows(self) -> float:
        """Rows that decode steps use, in the mean over their time."""
        return self.row_s / self.decode_s if self.decode_s else 0.0


class CostStep:
    """A step that will end at a known time."""

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
    """Samples `FILLER` for every request, and `EOS` as its last token."""

    def __init__(self, cost: Cost, clock: VirtualClock, lengths: TrueLengths) -> None:
        self.meter = Meter()
        self._cost = cost
        self._clock = clock
        self._lengths = lengths
        self._free_s = 0.0  # when the device has done all that was launched

    def launch(self, plan: Plan) -> CostStep:
        load = Load.of(plan)
        seconds = self._cost.seconds(load)
        self.meter.add(load, seconds)
        self._free_s = max(self._free_s, self._clock.now) + seconds
        ends = self._lengths.reached(plan.sampling.seeds, plan.sampling.positions)
        tokens = np.where(ends, np.int32(EOS), np.int32(FILLER))
        return CostStep(self._clock, self._free_s, Result(tokens=tokens))

    def control(self, request: DeviceRequest) -> Pending:
        return NO_DEVICE
