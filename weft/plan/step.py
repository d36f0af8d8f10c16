"""One step as the device sees it: the Plan that goes in, the Result that comes out, and the Runner
between them.

The scheduler makes Plans and never sees a tensor; the runner executes them and never sees a
request. Everything here is numpy arrays, so a Plan can be recorded, replayed, simulated, and
broadcast to other ranks. Sizes: R requests in the step, T tokens (the sum of `lens`), S tokens that
are sampled: one for each request that samples, and one behind each draft.

A draft is a guess of a token that is not known yet. Drafts stand behind the last known token of
their request, and a token is sampled behind each, as if the guess were right: whoever reads the
result keeps the tokens up to the first draft that another token was sampled for.

    tokens    | known | draft | draft |      lens 3, drafts 2
    sampled       a       b       c          a is kept; b, if a is the first draft; ...

The next step of the request may be planned before anybody has read that result. It computes the
whole run again, at the same places whatever counts of it, and the device, which knows, samples its
first token behind the last one that counts. Drafts behind the run are worth something if all of it
does.

    tokens    |  -1   |  -2   |  -3   | draft |      lens 4, unsettled 2, drafts 1
    which is      a       b       c       d
    sampled                       e       f          if a, b and c count; else one token, behind a
                                                     or b, and f means nothing

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
from weft.plan.inputs import EncodeAhead, InputOp
from weft.plan.logits import LogitOp
from weft.plan.outputs import AuxOutput, AuxRequest

# In Plan.tokens: the token sampled last for this row, which only the device knows. Of a row that
# sampled several in its last step it is the first of them; the others are those below it.
LAST_SAMPLED = -1
# In StateSlots.reads: all zeros, for a sequence begins.
NO_STATE = -1
# In Plan.adapters: the model as it is.
BASE = -1

Kind = TypeVar("Kind")


class ForwardMode(IntEnum):
    EXTEND = 0  # prompts, or chunks of them, behind what the cache already holds
    DECODE = 1  # one token for each request
    MIXED = 2  # both
    SPLIT_PREFILL = 3  # some layers of prompts, or chunks of them
    DRAFT = 4  # a second, smaller model guesses what comes next


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
class StateSlots:
    """Where layers that keep a state of fixed size, instead of K and V, find and leave it.

    A slot has the states of all these layers for one sequence. A state is a function of the tokens
    before it alone, however these were cut into steps. A row reads its state, takes in its tokens
    of this step one after the other, and writes the state behind the last one. Besides, it may
    leave copies of its state on the way:

        row of 5 tokens      reads ── t0 ── t1 ── t2 ── t3 ── t4 ── writes
        kept_lens 3                                 └── kept_slots

    No slot is written twice in a step, and none that a row writes is read by another row.
    """

    reads: IntArray  # [R] slot of the state before the row's tokens; NO_STATE: all zeros
    writes: IntArray  # [R] slot of the state behind the row's tokens; may be that of `reads`
    kept_rows: IntArray  # [K] which of the R rows leaves a copy of its state on the way,
    kept_lens: IntArray  # [K] behind how many of its tokens of this step, 1..lens[row],
    kept_slots: IntArray  # [K] and into which slot


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each of the S tokens is chosen.

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
class Drafting:
    """A step in which a draft model guesses tokens, one after the other. The model itself computes
    nothing in it.

    The plan's tokens are those that the draft model has not seen yet, up to the last known one of
    each request. Behind that it draws `counts` tokens, each from those before it:

        tokens    | known | known |                  lens 2
        drawn                     | d1 | d2 | d3 |   counts 3
        slots                     | d1 | d2 |        nothing follows the last one

    The result has `counts` tokens for each request. What the draft model leaves of its drafts lies
    in slots behind those of the KV pool, which no later step reads: what it has seen of a row are
    the tokens that plans gave it.
    """

    counts: IntArray  # [R], at least 1
    slots: IntArray  # [sum of counts - R] of the draft model's own


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers that one piece of a split prefill computes.

    The pieces of a prefill follow each other from the first layer to the last; steps of other
    requests may run between them. What a piece gives for its tokens stays on the device until the
    next one. At most one prefill is open in this way.

        prefill   | layers 0 1 | layers 2 3 | ... | last layers, head, sampling |
    """

    first: int
    last: int  # the one behind the last of the piece
    num_layers: int  # of the model
    # [T] place of each token among those of the piece before, if requests have left since; None:
    # they are the same.
    kept: LongArray | None = None

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers

    @property
    def part(self) -> float:
        """Of the work of the whole model."""
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
    # [R] whether the request samples a token; not in a middle chunk, nor for a prompt-only request
    samples: BoolArray
    sampling: Sampling  # of the S tokens, those of a request one after the other
    table: TableWrites | None = None
    inputs: tuple[InputOp, ...] = ()
    logits: tuple[LogitOp, ...] = ()  # in the order of `logits.ORDER`
    outputs: tuple[AuxRequest, ...] = ()  # at most one of each type
    window: WindowSlots | None = None  # None: `slots` and `table` are those of all layers
    states: StateSlots | None = None  # None: no layer keeps a state
    drafts: IntArray | None = None  # [R] how many of the last tokens are drafts; None: no token is
    # [R] drafts of the request's last step that are not compared yet, as far as is known: the step
    # begins with the run that was sampled there; None: there are none
    unsettled: IntArray | None = None
    layers: LayerSpan | None = None  # None: all of them
    drafting: Drafting | None = None  # None: the model itself computes the step
    # [R] place of each request's adapter among those that are loaded (`LoadAdapter`); BASE: none;
    # None: no request of the step has one
    adapters: IntArray | None = None
    # [3, T] positions in time, height and width by which tokens are rotated (M-RoPE); None: they
    # are those in the sequence
    rotation: IntArray | None = None
    # [T] position behind the last token that each one sees, where that is not the token itself
    # (`MediaRules.sees_both_ways`); None: every token sees up to itself
    sees_to: IntArray | None = None
    ahead: EncodeAhead | None = None  # what the encoder works on behind the step; None: nothing

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def adapters_of_tokens(self, num_places: int) -> IntArray | None:
        """[T] the adapter of each token, BASE or one of the places 0..num_places-1; None: no token
        has one."""
        if self.adapters is None:
            return None
        assert len(self.adapters) == len(self.rows), "adapters and rows disagree"
        lowest = self.adapters.min(initial=BASE)
        highest = self.adapters.max(initial=BASE)
        assert lowest >= BASE, "an adapter in a place below 0"
        assert highest < num_places, f"an adapter in place {highest} of {num_places}"
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
    # for some of the invalid ones: which sampling request, 0..S-1, and the error that it ends with
    faults: tuple[tuple[int, str], ...] = ()
    outputs: tuple[AuxOutput, ...] = ()  # one for each of `Plan.outputs`
    # what the encoder could not turn into vectors that the step takes, by digest, and why: what
    # was computed of the tokens concerned is worth nothing
    not_encoded: tuple[tuple[bytes, str], ...] = ()
    encoded: tuple[bytes, ...] = ()  # of `Plan.ahead`, what is there, by digest
    encoder_s: float = 0.0  # how long the encoder has worked, in this step and behind it

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
        flight, and none may be launched before it is done; but `ReadAdapter` at any time, and steps
        go on."""
        ...
