"""Auxiliary outputs of a step: the functions that compute them from its hidden states, by the type
of the request.

To add one: a request and an output in `plan/outputs.py`, a function here or in another file of this
folder, and a line in `COMPUTE`. This module knows no request of the scheduler: an `AuxRequest` is
about rows of a step. (Log probabilities of sampled tokens are not here: the sampler takes them from
its logits.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from weft.executor.outputs.pooling import Pooler
from weft.executor.outputs.prompt_logprobs import prompt_logprobs
from weft.models.registry import DecoderModel
from weft.ops.sampling import SamplerOps, on
from weft.plan.outputs import (
    AuxOutput,
    AuxRequest,
    HeardWeights,
    HeardWeightsRequest,
    HiddenStatesRequest,
    PooledVectors,
    PoolingRequest,
    PromptLogprobs,
    PromptLogprobsRequest,
    TokenStates,
)
from weft.plan.step import Plan


class WeighHeard(Protocol):
    """The weights with which heads attend to an encoder's vectors (`runner.StepEncoded`)."""

    def weights(self, row: int, places: slice, heads: Sequence[tuple[int, int]]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose layers have been computed, with all that its outputs need."""

    plan: Plan
    hidden: Tensor  # [T, H] output of the last layer
    model: DecoderModel
    sampler: SamplerOps
    pooler: Pooler | None  # None: the model makes no vectors
    heard: WeighHeard | None = None  # None: the model attends to no encoder


def pooled_vectors(step: ComputedStep, request: PoolingRequest) -> PooledVectors | None:
    if step.pooler is None:
        return None
    return PooledVectors(step.pooler(step.plan, request, step.hidden))


def logprobs_of_prompts(step: ComputedStep, request: PromptLogprobsRequest) -> PromptLogprobs:
    return prompt_logprobs(
        step.model,
        step.sampler,
        step.hidden,
        request,
    )


def states_of_tokens(step: ComputedStep, request: HiddenStatesRequest) -> TokenStates:
    """[N, H] float32, the output of the final norm (in transformers: `last_hidden_state`)."""
    places = on(step.hidden, request.places)
    states = step.model.normed(step.hidden[places])
    # A copy, because a model may overwrite its own memory in its next call.
    return TokenStates(states.float().numpy(force=True).copy())


def heard_weights(step: ComputedStep, request: HeardWeightsRequest) -> HeardWeights:
    assert step.heard is not None, "the model attends to no encoder"
    ends = np.cumsum(step.plan.lens).tolist()
    found = []
    asked = zip(request.index.tolist(), request.counts.tolist(), request.heads, strict=True)
    for i, count, heads in asked:
        places = slice(ends[i] - count, ends[i])
        weights = step.heard.weights(int(step.plan.rows[i]), places, heads)
        found.append(weights.transpose(0, 1).numpy(force=True).copy())
    return HeardWeights(tuple(found))


Compute: TypeAlias = Callable[[ComputedStep, Any], AuxOutput | None]
COMPUTE: dict[type[AuxRequest], Compute] = {
    PoolingRequest: pooled_vectors,
    PromptLogprobsRequest: logprobs_of_prompts,
    HiddenStatesRequest: states_of_tokens,
    HeardWeightsRequest: heard_weights,
}


def compute_aux_outputs(step: ComputedStep) -> tuple[AuxOutput, ...]:
    """The outputs of the plan that are computed from hidden states."""
    outputs = []
    for request in step.plan.outputs:
        compute = COMPUTE.get(type(request))
        if compute is None:
            continue  # computed by the sampler
        output = compute(step, request)
        if output is not None:
            outputs.append(output)
    return tuple(outputs)
