"""Outputs that a step may compute besides tokens. The class of each request is followed by the
class of its output.

A step has at most one `AuxRequest` of each kind; it covers all requests of the step that ask for
this kind. This module knows neither users' requests nor tensors. The runner has a function for each
type (`executor/outputs/`); a feature of the scheduler makes the request and reads the output.
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
    num_top: IntArray  # [L] number of likeliest tokens to report, too; 0: the sampled token only
    # [L, M] other tokens to report, too, shorter lists padded with 0; None: none
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

    The step that computes the last token of a prompt returns its vector. Earlier steps of the
    prompt also return a vector, which means nothing.
    """

    index: IntArray  # [E] which request of the step, 0..R-1
    completes: BoolArray  # [E] whether this step computes the prompt's last token
    # [E] whether to scale the vector to length 1 (for a classifier: to turn scores into
    # probabilities): 1 yes, 0 no, -1 as the model's configuration says
    normalize: IntArray
    dimensions: IntArray  # [E] output dimensions to keep (Matryoshka), the rest become 0; 0: all
    types: IntArray | None = None  # [T] segment of each token of the step; None: all are 0
    # [E, M] tokens whose log probabilities are returned instead of a vector, padded with 0; None:
    # return vectors
    labels: IntArray | None = None


@dataclass(frozen=True, slots=True)
class PooledVectors(AuxOutput):
    vectors: FloatArray  # [E, size]
    # [E] numbers of each vector that count, from the first on; None: all
    sizes: IntArray | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest(AuxRequest):
    """Asks for log probabilities of P tokens of Q prompts, each given all tokens before it.

    `places` and `targets` list the tokens of one request after those of another.
    """

    index: IntArray  # [Q] which request of the step, 0..R-1
    counts: IntArray  # [Q] how many of the P tokens are the request's
    num_top: IntArray  # [Q] number of likeliest tokens to report, too
    ids: IntArray  # [Q, M] other tokens to report, too, shorter lists padded with 0
    places: IntArray  # [P] index in the step, 0..T-1, of the token before the target
    targets: IntArray  # [P] ids of the tokens


@dataclass(frozen=True, slots=True)
class PromptLogprobs(AuxOutput):
    """Natural logarithms of the model's unchanged output distribution."""

    logprobs: FloatArray  # [P]
    ranks: IntArray  # [P] 1: no token is likelier
    top_ids: IntArray  # [P, K], K the largest num_top of the step
    top_logprobs: FloatArray  # [P, K], in falling order
    id_logprobs: FloatArray  # [P, M]


@dataclass(frozen=True, slots=True)
class HeardWeightsRequest(AuxRequest):
    """Asks for the weights with which single heads attend to an encoder's vectors, for the last
    tokens that the step computes for E requests."""

    index: IntArray  # [E] which request of the step, 0..R-1
    counts: IntArray  # [E] how many of the request's last tokens in the step
    heads: tuple[tuple[tuple[int, int], ...], ...]  # [E] (layer, head) of each


@dataclass(frozen=True, slots=True)
class HeardWeights(AuxOutput):
    weights: tuple[FloatArray, ...]  # [E] of [count, heads, vectors]


@dataclass(frozen=True, slots=True)
class HiddenStatesRequest(AuxRequest):
    """Asks for the hidden states of N tokens of E requests, as the final norm leaves them."""

    index: IntArray  # [E] which request of the step, 0..R-1
    # [E] how many of the N tokens are the request's: the last that the step computes for it
    counts: IntArray
    places: IntArray  # [N] index of the token in the step, 0..T-1; grouped by request


@dataclass(frozen=True, slots=True)
class TokenStates(AuxOutput):
    states: FloatArray  # [N, hidden size]
