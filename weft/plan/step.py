"""One step as the device sees it: the Plan that goes in, the Result that comes out, and the Runner
between them.

The scheduler makes Plans and never sees a tensor; the runner executes them and never sees a
request. Everything here is numpy arrays, so a Plan can be recorded, replayed, simulated, and
broadcast to other ranks. Sizes: R requests in the step, T tokens (the sum of `lens`), S requests
that sample a token (the number of true entries in `samples`).

A plan is open: `inputs`, `logits` and `outputs` are tuples of operations, whose types stand in the
files beside this one, and a step without any of them is the plain one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np

from weft.arrays import BoolArray, FloatArray, IntArray, LongArray
from weft.plan.device import DeviceRequest, Pending
from weft.plan.inputs import InputOp
from weft.plan.logits import LogitOp
from weft.plan.outputs import AuxOutput, AuxRequest

# In Plan.tokens: the token sampled last for this row, which only the device knows.
LAST_SAMPLED = -1

Kind = TypeVar("Kind")


class ForwardMode(IntEnum):
    EXTEND = 0  # prompts, or chunks of them, behind what the cache already holds
    DECODE = 1  # one token for each request
    MIXED = 2  # both


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changes of the row table that do not follow from a plan's own slots: cached prefixes,
    re-pointed duplicates.

    Applied in order, before the plan. Row `rows[i]` holds `slots` (the next `lens[i]` of them) from
    `starts[i]` on.
    """

    rows: IntArray  # [W]
    starts: IntArray  # [W]
    lens: IntArray  # [W]
    slots: IntArray  # [sum of lens]


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Where the layers with windows write K and V, and the changes of their row table, where these
    layers have a pool of slots of their own.

    Positions that no later token of a row sees keep what stood there.
    """

    slots: IntArray  # [T]
    table: TableWrites | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the S requests that sample choose their token.

    The noise is a function of (seed, position, token id) alone, so no request depends on another.
    """

    temperature: FloatArray  # [S], 0: greedy
    top_p: FloatArray  # [S], 1: off
    top_k: IntArray  # [S], 0: off
    min_p: FloatArray  # [S], 0: off
    seeds: LongArray  # [S]
    positions: IntArray  # [S] position in its sequence of the token to be sampled

    @property
    def is_greedy(self) -> bool:
        return not self.temperature.any()


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a device needs to know about one step."""

    step: int
    mode: ForwardMode
    rows: IntArray  # [R] row of each request in the row table
    starts: IntArray  # [R] tokens already in the cache
    lens: IntArray  # [R] tokens to run in this step
    tokens: IntArray  # [T] ids; LAST_SAMPLED: the token sampled last for this row
    slots: IntArray  # [T] where to write K and V
    # [R] whether the request samples a token; not in a middle chunk, nor for a prompt-only request
    samples: BoolArray
    sampling: Sampling  # of the S that do
    table: TableWrites | None = None
    inputs: tuple[InputOp, ...] = ()
    logits: tuple[LogitOp, ...] = ()  # in the order of `logits.ORDER`
    outputs: tuple[AuxRequest, ...] = ()  # at most one of each type
    window: WindowSlots | None = None  # None: `slots` and `table` are those of all layers

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """What one step gave.

    A request may get several tokens from one step. They stand one after the other:

        counts 1 3 1    tokens | a | b c d | e |
    """

    tokens: IntArray  # [sum of counts]
    counts: IntArray | None = None  # [S] tokens of each sampling request, at least 1; None: 1 each
    # [S] the logits were not finite: the request must end with an error; None: all were finite
    invalid: BoolArray | None = None
    # for some of the invalid ones: which sampling request, 0..S-1, and the error that it ends with
    faults: tuple[tuple[int, str], ...] = ()
    outputs: tuple[AuxOutput, ...] = ()  # one for each of `Plan.outputs`

    @property
    def first_tokens(self) -> IntArray:
        """[S] the first token of each sampling request."""
        if self.counts is None:
            return self.tokens
        first: IntArray = self.tokens[np.cumsum(self.counts) - self.counts]
        return first


def find(values: Iterable[object], kind: type[Kind]) -> Kind | None:
    """The first of the values that is a `kind`; None if there is none."""
    for value in values:
        if isinstance(value, kind):
            return value
    return None


class Step(Protocol):
    """A launched step."""

    def result(self) -> Result:
        """Wait for the step to end and return its result. Raises what the device raised."""
        ...

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...


class Runner(Protocol):
    """Executes plans, in the order in which they are launched: a later plan may read what an
    earlier one writes.
    """

    def launch(self, plan: Plan) -> Step:
        """Start the step; return without waiting for it.

        At most `loop depth + 1` steps are in flight.
        """
        ...

    def control(self, request: DeviceRequest) -> Pending:
        """Begin work that is no step; return without waiting for it. Only while no step is in
        flight, and none may be launched before it is done."""
        ...
