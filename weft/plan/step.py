"""One step as the device sees it: the Plan that goes in, the Result that comes out, and the Runner between them.

The scheduler makes Plans and never sees a tensor; the runner executes them and never sees a request. Everything here is
numpy arrays, so a Plan can be recorded, replayed, simulated, and broadcast to other ranks. Sizes: R requests in the
step, T tokens (the sum of `lens`), S requests that sample a token (the number of true entries in `samples`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from weft.arrays import BoolArray, FloatArray, IntArray, LongArray
from weft.plan.device import DeviceRequest, Pending

LAST_SAMPLED = (
    -1
)  # in Plan.tokens: the token sampled last for this row, which only the device knows
ANY = -1  # in LogitBias.after


class ForwardMode(IntEnum):
    EXTEND = 0  # prompts, or chunks of them, behind what the cache already holds
    DECODE = 1  # one token for each request
    MIXED = 2  # both


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changes of the row table that do not follow from a plan's own slots: cached prefixes, re-pointed duplicates.

    Applied in order, before the plan. Row `rows[i]` holds `slots` (the next `lens[i]` of them) from `starts[i]` on.
    """

    rows: IntArray  # [W]
    starts: IntArray  # [W]
    lens: IntArray  # [W]
    slots: IntArray  # [sum of lens]


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to single logits, -inf to forbid a token (min_new_tokens, bad words)."""

    index: IntArray  # [B] which sampling request, 0..S-1
    tokens: IntArray  # [B]
    values: FloatArray  # [B]
    after: IntArray | None = (
        None  # [B] only where the request's last token is this one; ANY: whatever it is
    )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties on tokens seen before, for P of the S sampling requests.

    `history` is each request's prompt and known output, one after the other; `offsets[i]:offsets[i + 1]` is request
    i's, and its output begins at `output_starts[i]` (an index into `history`). Where `lacks_last[i]`, the request's
    last output token is not in it, for only the device knows it yet: the runner adds it.
    """

    index: IntArray  # [P] which sampling request
    frequency: FloatArray  # [P]
    presence: FloatArray  # [P]
    repetition: FloatArray  # [P]
    history: IntArray  # [H]
    offsets: IntArray  # [P + 1]
    output_starts: IntArray  # [P]
    lacks_last: BoolArray  # [P]


class Promise(Protocol):
    """The words of a mask, which may still be worked out while the model computes the logits that they are for."""

    @property
    def words(self) -> IntArray:
        """[M, W]. Waits for them."""
        ...

    @property
    def faults(self) -> Mapping[int, str]:
        """Which rows mean nothing, and the error with which their requests must end. Waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """Words that are there."""

    words: IntArray  # [M, W]

    @property
    def faults(self) -> Mapping[int, str]:
        return {}


@dataclass(frozen=True, slots=True)
class Mask:
    """What M of the S sampling requests may choose from: token t if bit t % 32 of its word t // 32 is 1.

    A token without a bit (from 32 W on) is forbidden. The sampler alone asks for the words, when the layers have been
    launched.
    """

    index: IntArray  # [M] which sampling request
    promise: Promise


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Which sampling requests want log probabilities, and of how many of the likeliest tokens."""

    index: IntArray  # [L]
    num_top: IntArray  # [L], 0: of the sampled token only
    ids: IntArray | None = (
        None  # [L, M] tokens that are wanted whatever is sampled; a shorter list is filled up with 0
    )


@dataclass(frozen=True, slots=True)
class Processing:
    """One logit processor, and the P of the S sampling requests whose logits it changes."""

    name: str
    index: IntArray  # [P] which sampling request
    params: tuple[Mapping[str, Any], ...]  # [P] plain JSON values
    tokens: tuple[IntArray, ...]  # [P] prompt and whole output, [length] each
    prompt_lens: tuple[int, ...]  # [P]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What F of the S sampling requests take, whatever the logits are."""

    index: IntArray  # [F] which sampling request
    tokens: IntArray  # [F]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the S requests that sample choose their token. Noise is a function of (seed, position, token id) alone."""

    temperature: FloatArray  # [S], 0: greedy
    top_p: FloatArray  # [S], 1: off
    top_k: IntArray  # [S], 0: off
    min_p: FloatArray  # [S], 0: off
    seeds: LongArray  # [S]
    positions: IntArray  # [S] position in its sequence of the token to be sampled
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    processors: tuple[Processing, ...] = ()  # one after the other
    allowed: Mask | None = None  # as `mask`, and does not change from step to step
    mask: Mask | None = None
    fixed: Fixed | None = None
    logprobs: Logprobs | None = None

    @property
    def is_greedy(self) -> bool:
        return not self.temperature.any()

    @property
    def is_plain(self) -> bool:
        """Whether nothing but grammars changes the logits before tokens are chosen, and nothing is told of them."""
        changes = (self.bias, self.penalties, self.allowed, self.fixed, self.logprobs)
        return not self.processors and changes == (None,) * 5


@dataclass(frozen=True, slots=True)
class Pooling:
    """Requests of which one vector each is wanted. It is given in the step that computes the last token of the prompt;
    what the steps before that give means nothing."""

    index: IntArray  # [E] which request of the step, 0..R-1
    completes: BoolArray  # [E] whether this is that step
    normalize: IntArray  # [E] to length 1, of a classifier to probabilities: 1 yes, 0 no, -1 as its makers meant it
    dimensions: (
        IntArray  # [E] how many of the first numbers are wanted, the others become 0; 0: all
    )
    types: IntArray | None = (
        None  # [T] kind of segment of each token of the step; None: all are of kind 0
    )
    labels: IntArray | None = (
        None  # [E, M] tokens whose log probabilities are wanted instead; filled up with 0
    )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """P tokens of the prompts of Q requests, whose log probabilities are wanted given all that stands before them.

    `places` and `targets` have one request's after the other's. A list in `ids` that is shorter is filled up with 0.
    """

    index: IntArray  # [Q] which request of the step, 0..R-1
    counts: IntArray  # [Q] how many of the P are its
    num_top: IntArray  # [Q] of how many of the likeliest tokens, too
    ids: IntArray  # [Q, M] and of which tokens in any case
    places: IntArray  # [P] which token of the step stands before it, 0..T-1
    targets: IntArray  # [P] ids


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """N tokens of E requests whose hidden states are wanted, as the final norm leaves them."""

    index: IntArray  # [E] which request of the step, 0..R-1
    counts: IntArray  # [E] how many of the N are its: the last that the step computes for it
    places: IntArray  # [N] which token of the step, 0..T-1; one request's after the other's


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step is to give besides tokens. None: nothing of that kind."""

    pooling: Pooling | None = None
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: HiddenStates | None = None


@dataclass(frozen=True, slots=True)
class InputVectors:
    """V tokens of a step that are no rows of the embedding: these vectors are what the first layer gets for them. Their
    ids are valid, and mean nothing."""

    index: IntArray  # [V] which token of the step, 0..T-1
    rows: FloatArray  # [V, hidden size]


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
    samples: BoolArray  # [R] whether the request samples a token after this step (false: a middle chunk, or it wants none)
    sampling: Sampling  # of the S that do
    table: TableWrites | None = None
    vectors: InputVectors | None = None
    wanted: Wanted | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log probabilities (natural logarithm, after bias, penalties and mask, before temperature) for L requests."""

    logprob: FloatArray  # [L] of the sampled token
    top_ids: IntArray  # [L, K], K the largest num_top of the step
    top_logprobs: FloatArray  # [L, K], in falling order
    id_logprobs: FloatArray | None = None  # [L, M], of `Logprobs.ids`


@dataclass(frozen=True, slots=True)
class PlaceLogprobs:
    """What `PromptLogprobs` asked for: natural logarithms, of the model's output as it is."""

    logprobs: FloatArray  # [P]
    ranks: IntArray  # [P] 1: no token is likelier
    top_ids: IntArray  # [P, K], K the largest num_top of the step
    top_logprobs: FloatArray  # [P, K], in falling order
    id_logprobs: FloatArray  # [P, M]


@dataclass(frozen=True, slots=True)
class Given:
    """What `Wanted` asked for."""

    pooled: FloatArray | None = None  # [E, size]
    prompt_logprobs: PlaceLogprobs | None = None
    hidden_states: FloatArray | None = None  # [N, hidden size]


@dataclass(frozen=True, slots=True)
class Result:
    """What one step gave."""

    tokens: IntArray  # [S]
    invalid: BoolArray | None = (
        None  # [S] the logits were not finite: the request must end with an error
    )
    faults: tuple[
        tuple[int, str], ...
    ] = ()  # of the invalid ones, 0..S-1, those whose error has a name, and that
    logprobs: TopLogprobs | None = None
    given: Given | None = None


class Step(Protocol):
    """A launched step."""

    def result(self) -> Result:
        """Wait for the step to end and return its result. Raises what the device raised."""
        ...

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...


class Runner(Protocol):
    """Executes plans, in the order in which they are launched: a later plan may read what an earlier one writes."""

    def launch(self, plan: Plan) -> Step:
        """Start the step; return without waiting for it. At most `loop depth + 1` steps are in flight."""
        ...

    def control(self, request: DeviceRequest) -> Pending:
        """Begin work that is no step; return without waiting for it. Only while no step is in flight, and none may be
        launched before it is done."""
        ...
