"""What a step may compute besides tokens: each request for it stands beside the output that answers
it.

A step has at most one `AuxRequest` of each kind; it covers all requests of the step that ask for
this kind. Nothing here knows a request of a user or a tensor. A runner has a function for each type
(`executor/outputs/`), a feature of the scheduler makes the request and reads the output.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class AuxRequest:
    """Asks a step for one kind of output besides tokens."""


@dataclass(frozen=True, slots=True)
class AuxOutput:
    """Answers an `AuxRequest`."""


@dataclass(frozen=True, slots=True)
class SampledLogprobsRequest(AuxRequest):
    """Asks for log probabilities of the tokens that L of the S sampling requests sample."""

    index: IntArray  # [L] which sampling request, 0..S-1
    num_top: IntArray  # [L] also of the k likeliest tokens; 0: of the sampled token only
    # [L, M] also of these tokens, shorter lists filled up with 0; None: of no others
    ids: IntArray | None = None


@dataclass(frozen=True, slots=True)
class SampledLogprobs(AuxOutput):
    """Natural logarithms, after all changes of the logits, before temperature."""

    logprob: FloatArray  # [L] of the sampled token
    top_ids: IntArray  # [L, K], K the largest num_top of the step
    top_logprobs: FloatArray  # [L, K], in falling order
    id_logprobs: FloatArray | None = None  # [L, M] of the `ids` that were asked for


@dataclass(frozen=True, slots=True)
class PoolingRequest(AuxRequest):
    """Asks for one vector of each of E prompts.

    The step that computes the last token of a prompt gives its vector. The vectors that earlier
    steps give for it mean nothing.
    """

    index: IntArray  # [E] which request of the step, 0..R-1
    completes: BoolArray  # [E] whether this step computes the prompt's last token
    # [E] to length 1, for a classifier to probabilities: 1 yes, 0 no, -1 as the model's makers
    # meant it
    normalize: IntArray
    dimensions: IntArray  # [E] output dimensions to keep (Matryoshka), the others become 0; 0: all
    types: IntArray | None = None  # [T] segment of each token of the step; None: all are 0
    # [E, M] log probabilities of these tokens instead of a vector, filled up with 0; None: a vector
    labels: IntArray | None = None


@dataclass(frozen=True, slots=True)
class PooledVectors(AuxOutput):
    vectors: FloatArray  # [E, size]


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest(AuxRequest):
    """Asks for log probabilities of P tokens of Q prompts, each given all tokens before it.

    `places` and `targets` hold one request's tokens after the other's.
    """

    index: IntArray  # [Q] which request of the step, 0..R-1
    counts: IntArray  # [Q] how many of the P are its tokens
    num_top: IntArray  # [Q] also of the k likeliest tokens
    ids: IntArray  # [Q, M] also of these tokens, shorter lists filled up with 0
    places: IntArray  # [P] which token of the step comes before it, 0..T-1
    targets: IntArray  # [P] ids


@dataclass(frozen=True, slots=True)
class PromptLogprobs(AuxOutput):
    """Natural logarithms, of the model's output as it is."""

    logprobs: FloatArray  # [P]
    ranks: IntArray  # [P] 1: no token is likelier
    top_ids: IntArray  # [P, K], K the largest num_top of the step
    top_logprobs: FloatArray  # [P, K], in falling order
    id_logprobs: FloatArray  # [P, M]


@dataclass(frozen=True, slots=True)
class HiddenStatesRequest(AuxRequest):
    """Asks for the hidden states of N tokens of E requests, as the final norm leaves them."""

    index: IntArray  # [E] which request of the step, 0..R-1
    counts: IntArray  # [E] how many of the N are its tokens: the last that the step computes for it
    places: IntArray  # [N] which token of the step, 0..T-1; one request's after the other's


@dataclass(frozen=True, slots=True)
class TokenStates(AuxOutput):
    states: FloatArray  # [N, hidden size]
