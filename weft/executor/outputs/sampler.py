"""From logits to tokens.

The operations of a plan change the logits in the order of `plan/logits.py`; then log probabilities
are taken, and a token is chosen. `ops/sampling.py` defines how a token is chosen, with an
implementation for each kind of device. No row depends on another. To add an operation: a function
here, and its line in `APPLY`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from weft.arrays import FloatArray
from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.prompt_logprobs import id_logprobs
from weft.ops.sampling import SampledTokens, SamplerOps, SamplingArrays, moved, on
from weft.plan.logits import (
    ANY,
    NOTHING_LEFT,
    AllowedTokens,
    FixedTokens,
    GrammarMask,
    LogitBias,
    LogitOp,
    Penalties,
    ProcessorCall,
    TimestampRules,
)
from weft.plan.outputs import AuxOutput, SampledLogprobs, SampledLogprobsRequest
from weft.plan.step import Plan, Result, find


@dataclass(slots=True)
class SamplerStep:
    """One step while it samples. The operations change `logits` in place."""

    sampler: SamplerOps
    logits: Tensor  # [S, V] float32
    last_tokens: Tensor  # [S] int64, the last token of each sequence
    processors: Processors | None
    # Rows that cannot be sampled, with the error that ends their requests.
    faults: dict[int, str] = field(default_factory=dict)


def add_bias(step: SamplerStep, bias: LogitBias) -> None:
    logits = step.logits
    index = on(logits, bias.index)
    values = on(logits, bias.values)
    if bias.after is not None:
        # A bias that applies only after one token: the last one, which only the device may know.
        after = on(logits, bias.after)
        applies = (after == ANY) | (after == step.last_tokens[index])
        values = torch.where(applies, values, 0)
    tokens = on(logits, bias.tokens)
    # Two biases of a request may name the same token: both count.
    logits.index_put_((index, tokens), values, accumulate=True)


def penalize(step: SamplerStep, penalties: Penalties) -> None:
    step.sampler.penalise(step.logits, penalties, step.last_tokens)


def call_processor(step: SamplerStep, call: ProcessorCall) -> None:
    assert step.processors is not None, "a step names logit processors, and there are none"
    step.faults |= step.processors.apply(step.logits, call, without=step.faults)


def allow_tokens(step: SamplerStep, allowed: AllowedTokens) -> None:
    logits = step.logits
    words = moved(allowed.words, logits.device)
    index = on(logits, allowed.index)
    step.sampler.mask(logits, words, index)


def apply_grammar_mask(step: SamplerStep, mask: GrammarMask) -> None:
    logits = step.logits
    # A thread may still be filling the words while the layers run: this waits until they are
    # complete.
    words = moved(mask.bitmask.words, logits.device)
    index = on(logits, mask.index)
    step.sampler.mask(logits, words, index)
    for i, fault in mask.bitmask.faults.items():
        step.faults[int(mask.index[i])] = fault


def fix_tokens(step: SamplerStep, fixed: FixedTokens) -> None:
    logits = step.logits
    rows = on(logits, fixed.index)
    tokens = on(logits, fixed.tokens)
    logits[rows] = -torch.inf
    logits[rows, tokens] = 0


def apply_timestamp_rules(step: SamplerStep, rules: TimestampRules) -> None:
    firsts = rules.first.tolist()
    ranges = rules.forbidden.tolist()
    for row, first, forbidden in zip(rules.index.tolist(), firsts, ranges, strict=True):
        logits = step.logits[row]
        if logits.device.type == "cpu":
            _limit_times(logits.numpy(), first, forbidden)
            continue
        for begin, end in forbidden:
            logits[begin:end] = -torch.inf
        # Compared on the device, which need not wait for the host.
        wins = logits[first:].logsumexp(0) > logits[:first].max()
        logits[:first].masked_fill_(wins, -torch.inf)


def _limit_times(logits: FloatArray, first: int, forbidden: Sequence[Sequence[int]]) -> None:
    """The same for logits [V] in memory. In numpy: for so little work, several threads of torch
    would wait for each other longer than they compute."""
    for begin, end in forbidden:
        logits[begin:end] = -np.inf
    times = logits[first:]
    likeliest = times.max()
    if not np.isfinite(likeliest):
        return
    of_all = likeliest + np.log(np.exp(times - likeliest).sum())
    if of_all > logits[:first].max():
        logits[:first] = -np.inf


Apply: TypeAlias = Callable[[SamplerStep, Any], None]
APPLY: dict[type[LogitOp], Apply] = {
    LogitBias: add_bias,
    Penalties: penalize,
    ProcessorCall: call_processor,
    AllowedTokens: allow_tokens,
    GrammarMask: apply_grammar_mask,
    TimestampRules: apply_timestamp_rules,
    FixedTokens: fix_tokens,
}


class SamplerOutput(NamedTuple):
    """The output of the sampler, in tensors on the device."""

    tokens: Tensor  # [S] int64
    invalid: Tensor  # [S] bool
    # [S] bool: operations of the step have forbidden every token; None: there are no operations
    emptied: Tensor | None
    logprobs: tuple[Tensor, ...] | None  # the fields of `SampledLogprobs`
    faults: tuple[tuple[int, str], ...] = ()  # errors of some of the invalid rows

    def moved(self, move: Callable[[Tensor], Tensor]) -> SamplerOutput:
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(move(tensor) for tensor in self.logprobs)
        return SamplerOutput(
            tokens=move(self.tokens),
            invalid=move(self.invalid),
            emptied=None if self.emptied is None else move(self.emptied),
            logprobs=logprobs,
            faults=self.faults,
        )

    def result(self, outputs: tuple[AuxOutput, ...] = ()) -> Result:
        """The result for the scheduler, with the other outputs of the step."""
        tokens = self.tokens.numpy(force=True)
        invalid = self.invalid.numpy(force=True)
        if self.logprobs is not None:
            arrays = [tensor.numpy(force=True) for tensor in self.logprobs]
            outputs = (SampledLogprobs(*arrays), *outputs)
        has_invalid = bool(invalid.any())
        faults = self.faults
        # An emptied row is invalid, too.
        if self.emptied is not None and has_invalid:
            emptied = np.flatnonzero(self.emptied.numpy(force=True)).tolist()
            faults += tuple((i, NOTHING_LEFT) for i in emptied)
        return Result(
            tokens=tokens.astype(np.int32),
            invalid=invalid if has_invalid else None,
            faults=faults,
            outputs=outputs,
        )


def sample(
    sampler: SamplerOps,
    logits: Tensor,
    plan: Plan,
    last_tokens: Tensor,
    processors: Processors | None = None,
    draws: SamplingArrays | None = None,
) -> SamplerOutput:
    """Choose one token per row of logits [S, V] (float32; overwritten), as the plan says.

    `last_tokens` [S] are those that the sequences end with, for penalties whose history lacks them.
    A row whose logits hold NaN or +inf, or nothing but -inf, is invalid and gets token 0.
    `processors` are needed if the plan names some; `draws` are those of `plan.sampling`, where the
    device has them already.
    """
    step = SamplerStep(sampler, logits, last_tokens, processors)
    for op in plan.logits:
        APPLY[type(op)](step, op)
    if step.faults:
        logits[list(step.faults)] = torch.nan  # so that they are invalid, whatever came after
    if draws is None:
        draws = plan.sampling
    chosen = sampler.tokens(logits, draws)
    # True for infinities and NaN; isfinite takes ten times as long.
    largest = chosen.max_logits
    invalid = largest.sub(largest) != 0
    chosen.tokens.masked_fill_(invalid, 0)
    # Rows of `step.faults` are NaN. A model alone gives no row of -inf.
    emptied = largest == -torch.inf if plan.logits else None
    logprobs = None
    asked = find(plan.outputs, SampledLogprobsRequest)
    if asked is not None:
        logprobs = _logprobs(sampler, logits, chosen, asked)
    return SamplerOutput(chosen.tokens, invalid, emptied, logprobs, tuple(step.faults.items()))


def _logprobs(
    sampler: SamplerOps,
    logits: Tensor,
    chosen: SampledTokens,
    asked: SampledLogprobsRequest,
) -> tuple[Tensor, ...]:
    """The fields of `SampledLogprobs`, of the requests that asked."""
    vocab_size = logits.shape[1]
    # As many for each as the request that wants most gets: the scheduler drops the rest.
    num_top = min(int(asked.num_top.max(initial=0)), vocab_size)
    rows = on(logits, asked.index)
    found = sampler.logprobs(
        logits,
        chosen,
        rows,
        num_top,
    )
    if asked.ids is None:
        return found
    of_ids = id_logprobs(
        logits[rows],
        on(logits, asked.ids),
        logits[rows, chosen.tokens[rows]],
        found.logprob,
    )
    return *found, of_ids
