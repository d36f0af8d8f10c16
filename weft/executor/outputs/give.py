"""What a step gives besides tokens: each kind has a file of its own beside this one."""

from __future__ import annotations

from torch import Tensor

from weft.executor.outputs.hidden import hidden_states
from weft.executor.outputs.pooling import Pooler
from weft.executor.outputs.prompt_logprobs import prompt_logprobs
from weft.models.registry import DecoderModel
from weft.ops.sampling import SamplerOps
from weft.plan.step import Given, Plan, Wanted


def give(
    plan: Plan,
    wanted: Wanted,
    hidden: Tensor,
    model: DecoderModel,
    sampler: SamplerOps,
    pooler: Pooler | None,
) -> Given:
    """`hidden` [T, H] are the hidden states of the step, as the last layer leaves them."""
    asked = wanted.prompt_logprobs
    states = wanted.hidden_states
    pooling = wanted.pooling
    return Given(
        pooled=None if pooling is None or pooler is None else pooler(plan, pooling, hidden),
        prompt_logprobs=None if asked is None else prompt_logprobs(model, sampler, hidden, asked),
        hidden_states=None if states is None else hidden_states(model, hidden, states),
    )
