"""One step as the device sees it: the Plan that goes in, the Result that comes out, and the Runner
between them.

The scheduler makes Plans and never sees a tensor; the runner executes them and never sees a
request. Everything here is numpy arrays, so a Plan can be recorded, replayed, simulated, and
broadcast to other ranks. Sizes: R requests in the step, T tokens (the sum of `lens`), S tokens that
are sampled: one for each request that samples, and one more after each draft.

A draft is a guess of a token that is not known yet. The drafts of a request follow its last known
token. The step samples a token after each draft, as if the draft were right. The reader of the
result keeps the sampled tokens up to the first one that differs from its draft.

    tokens    | known | draft | draft |      lens 3, drafts 2
    sampled       a       b       c          a is kept; b, if a is the first draft; ...

The next step of the request may be planned before that result is known. It computes the whole run
again, at the same positions, however much of it counts. The device, which knows the result, samples
the first token after the last token that counts. Drafts after the run are useful only if the whole
run counts.

    tokens    |  -1   |  -2   |  -3   | draft |      lens 4, unsettled 2, drafts 1
    which is      a       b       c       d
    sampled                       e       f          if a, b and c count; else one token, after a
                                                     or b, and f means nothing

A plan is open: `inputs`, `logits` and `outputs` are tuples of operations, whose types are in the
other files of this folder. A plain step has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray, FloatArray, IntArray, LongArray
from weft.plan.device import DeviceRequest, Pending
from weft.plan.inputs import EncodeAhead, InputOp
from weft.plan.logits import LogitOp
from weft.plan.outputs import AuxOutput, AuxRequest

# In Plan.tokens: the token sampled last for this row, which only the device knows. If the row
# sampled several tokens in its last step, -1 is the first of them, -2 the second, and so on.
LAST_SAMPLED = -1
# In StateSlots.reads: a state of zeros, because a sequence begins.
NO_STATE = -1
# In Plan.adapters: the model without an adapter.
BASE = -1

Kind = TypeVar("Kind")


class ForwardMode(IntEnum):
    EXTEND = 0  # prompts, or chunks of them, after their cached prefix
    DECODE = 1  # one token for each request
    MIXED = 2  # both
    SPLIT_PREFILL = 3  # some layers of prompts, or chunks of them
    DRAFT = 4  # a second, smaller model guesses the next tokens


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changes of the row table that do not follow from the slots of a plan: cached prefixes, and
    duplicate pages that were replaced.

    Applied in order, before the plan. Row `rows[i]` holds `slots` (the next `lens[i]` of them) from
    `starts[i]` on.
    """

    rows: IntArray  # [W]
    starts: IntArray  # [W]
    lens: IntArray  # [W]
    slots: IntArray  # [sum of lens]


@dataclass(frozen=True, slots=True)
class SlotCopies:
    """K and V that tokens get from others, instead of being computed: those of slot `sources[i]`
    are copied to `targets[i]`.

    Done before the plan's tokens are computed, as if all were read before the first is written.
    """

    sources: IntArray  # [C]
    targets: IntArray  # [C] no slot stands twice


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """The slots into which layers with windows write K and V, and the changes of their row table,
    if these layers have a pool of slots of their own.

    In this row table, positions that no later token of the row sees keep their old slots.
    """

    slots: IntArray  # [T]
    table: TableWrites | None = None


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where layers that keep a state of fixed size, instead of K and V, read and write it.

    A slot has the states of all these layers for one sequence. A state depends only on the tokens
    before it, not on how they were divided into steps. A row reads its state, processes its tokens
    of this step in order, and writes the state after the last token. It may also write copies of
    its state between tokens:

        row of 5 tokens      reads ── t0 ── t1 ── t2 ── t3 ── t4 ── writes
        kept_lens 3                                 └── kept_slots

    No slot is written twice in a step, and no row reads a slot that another row writes.
    """

    reads: IntArray  # [R] slot of the state before the row's tokens; NO_STATE: all zeros
    writes: IntArray  # [R] slot of the state after the row's tokens; may equal `reads`
    kept_rows: IntArray  # [K] which of the R rows writes a copy of its state,
    kept_lens: IntArray  # [K] after how many of its tokens of this step, 1..lens[row],
    kept_slots: IntArray  # [K] and into which slot


class SamplingNumbers(Protocol):
    """What a request asks for."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...  # 0 or less: off
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


class SamplingColumns(NamedTuple):
    """The numbers of n rows."""

    temperature: FloatArray  # [n], 0: greedy
    top_p: FloatArray  # [n], 1: off
    top_k: IntArray  # [n], 0: off
    min_p: FloatArray  # [n], 0: off
    seeds: LongArray  # [n]

    @classmethod
    def zeros(cls, num_rows: int) -> SamplingColumns:
        return cls(
            temperature=np.zeros(num_rows, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int32),
            top_p=np.zeros(num_rows, dtype=np.float32),
            min_p=np.zeros(num_rows, dtype=np.float32),
            seeds=np.zeros(num_rows, dtype=np.int64),
        )

    def write(self, row: int, numbers: SamplingNumbers, seed: int) -> None:
        """Set the numbers of one row."""
        self.temperature[row] = numbers.temperature
        self.top_k[row] = max(numbers.top_k, 0)
        self.top_p[row] = numbers.top_p
        self.min_p[row] = numbers.min_p
        self.seeds[row] = seed

    def take(self, rows: IntArray) -> SamplingColumns:
        """The numbers of `rows` [m]."""
        # One by one: this is done in each step with other rows.
        return SamplingColumns(
            self.temperature.take(rows),
            self.top_p.take(rows),
            self.top_k.take(rows),
            self.min_p.take(rows),
            self.seeds.take(rows),
        )

    def some(self, kept: BoolArray) -> SamplingColumns:
        """The numbers of the rows that are `kept` [n]."""
        columns: tuple[Any, ...] = tuple(column[kept] for column in self)
        return SamplingColumns(*columns)

    def repeated(self, counts: IntArray) -> SamplingColumns:
        """The numbers of each row `counts` [n] times."""
        columns: tuple[Any, ...] = tuple(np.repeat(column, counts) for column in self)
        return SamplingColumns(*columns)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each of the S tokens of a step is chosen.

    The noise is a function of (seed, position, token id) alone, so no request depends on another.
    """

    temperature: FloatArray  # [S], 0: greedy
    top_p: FloatArray  # [S], 1: off
    top_k: IntArray  # [S], 0: off
    min_p: FloatArray  # [S], 0: off
    seeds: LongArray  # [S]
    positions: IntArray  # [S] position of the sampled token in its sequence

    @classmethod
    def greedy(cls, num_tokens: int = 0) -> Sampling:
        """The likeliest tokens, at positions that nobody reads."""
        columns = SamplingColumns.zeros(num_tokens)
        return cls(*columns, np.zeros(num_tokens, dtype=np.int32))

    @property
    def is_greedy(self) -> bool:
        return not self.temperature.any()

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The arrays, in the order of the fields."""
        for name in self.__slots__:
            yield getattr(self, name)

    def take(self, index: LongArray) -> Sampling:
        """How the tokens `index` [n] are chosen."""
        columns: tuple[Any, ...] = tuple(column[index] for column in self)
        return Sampling(*columns)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A step in which a draft model guesses tokens, one after the other. The model itself computes
    nothing in it.

    The plan's tokens are those that the draft model has not computed yet, up to the last known
    token of each request. After them it draws `counts` tokens, each from those before it:

        tokens    | known | known |                  lens 2
        drawn                     | d1 | d2 | d3 |   counts 3
        slots                     | d1 | d2 |        nothing follows the last one

    The result has `counts` tokens for each request. The draft model writes the K and V of its
    drafts into slots after those of the KV pool, which no later step reads. So its KV of a row
    covers only the tokens that plans gave it.
    """

    counts: IntArray  # [R], at least 1
    slots: IntArray  # [sum of counts - R] slots of the draft model only


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers that one piece of a split prefill computes.

    The pieces of a prefill follow each other from the first layer to the last; steps of other
    requests may run between them. The output of a piece stays on the device until the next piece.
    At most one prefill is open in this way.

        prefill   | layers 0 1 | layers 2 3 | ... | last layers, head, sampling |
    """

    first: int
    last: int  # one more than the last layer of the piece
    num_layers: int  # of the model
    # [T] index of each token among those of the piece before, if requests have left since; None:
    # the tokens are the same.
    kept: LongArray | None = None

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers

    @property
    def part(self) -> float:
        """Share of the work of the whole model."""
        return (self.last - self.first) / self.num_layers


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
    # [R] whether the request samples a token; false in a middle chunk and for a prompt-only request
    samples: BoolArray
    sampling: Sampling  # of the S tokens, grouped by request
    table: TableWrites | None = None
    copies: SlotCopies | None = None  # between the slots of all layers; None: there are none
    inputs: tuple[InputOp, ...] = ()
    logits: tuple[LogitOp, ...] = ()  # in the order of `logits.ORDER`
    outputs: tuple[AuxRequest, ...] = ()  # at most one of each type
    window: WindowSlots | None = None  # None: `slots` and `table` are those of all layers
    states: StateSlots | None = None  # None: no layer keeps a state
    drafts: IntArray | None = None  # [R] how many of the last tokens are drafts; None: no token is
    # [R] drafts of the request's last step that were not compared yet when this step was planned:
    # the step begins with the run that was sampled there; None: there are none
    unsettled: IntArray | None = None
    layers: LayerSpan | None = None  # None: all of them
    drafting: Drafting | None = None  # None: the model itself computes the step
    # [R] slot of each request's adapter among the loaded ones (`LoadAdapter`); BASE: no adapter;
    # None: no request of the step has one
    adapters: IntArray | None = None
    # [3, T] positions in time, height and width by which tokens are rotated (M-RoPE); None: the
    # positions in the sequence
    rotation: IntArray | None = None
    # [T] end (exclusive) of the positions that each token sees, if a token sees later ones
    # (`MediaRules.sees_both_ways`); None: every token sees up to itself
    sees_to: IntArray | None = None
    ahead: EncodeAhead | None = None  # what the encoder works on after the step; None: nothing

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def adapters_of_tokens(self, num_adapter_slots: int) -> IntArray | None:
        """[T] the adapter of each token, BASE or one of the slots 0..num_places-1; None: no token
        has one."""
        if self.adapters is None:
            return None
        assert len(self.adapters) == len(self.rows), "adapters and rows disagree"
        lowest = self.adapters.min(initial=BASE)
        highest = self.adapters.max(initial=BASE)
        assert lowest >= BASE, "an adapter in a slot below 0"
        assert highest < num_adapter_slots, f"an adapter in slot {highest} of {num_adapter_slots}"
        return np.repeat(self.adapters, self.lens)

    @property
    def num_sampled(self) -> BoolArray | IntArray:
        """[R] how many tokens are sampled for each request."""
        if self.drafts is None:
            return self.samples
        return np.where(self.samples, self.drafts + 1, 0).astype(np.int32)


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
    # for some of the invalid requests: index, 0..S-1, and the error with which the request ends
    faults: tuple[tuple[int, str], ...] = ()
    outputs: tuple[AuxOutput, ...] = ()  # one for each of `Plan.outputs`
    # items of the step that the encoder could not turn into vectors, by digest, and why: the output
    # for tokens that take these vectors is invalid
    not_encoded: tuple[tuple[bytes, str], ...] = ()
    encoded: tuple[bytes, ...] = ()  # digests of the items of `Plan.ahead` that are complete
    encoder_s: float = 0.0  # time that the encoder has worked, in this step and after it

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
    """Executes plans in the order in which they are launched: a later plan may read what an earlier
    one writes."""

    def launch(self, plan: Plan) -> Step:
        """Start the step; return without waiting for it.

        At most `loop depth + 1` steps are in flight.
        """
        ...

    def control(self, request: DeviceRequest) -> Pending:
        """Start work that is not a step; return without waiting for it.

        Call it only while no step is in flight, and launch no step before the work is done.
        `ReadAdapter` is the exception: it may be started at any time, and steps go on.
        """
        ...
