"""From logits to tokens.

The order is: logit bias · penalties · logit processors · masks · fixed tokens · (log probabilities are taken here) ·
the choice of a token, which is defined in `ops/sampling.py` and has a twin for each kind of device. No row depends on
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.prompt_logprobs import id_logprobs
from weft.ops.sampling import SampledTokens, SamplerOps, SamplingArrays, moved, on
from weft.plan.step import ANY, Fixed, LogitBias, Logprobs, Result, Sampling, TopLogprobs


class SamplerOutput(NamedTuple):
    tokens: Tensor  # [S] int64
    invalid: Tensor  # [S] bool
    logprobs: tuple[Tensor, ...] | None  # the fields of `TopLogprobs`
    faults: tuple[tuple[int, str], ...] = ()  # which of the invalid ones have an error with a name

    def moved(self, move: Callable[[Tensor], Tensor]) -> SamplerOutput:
        logprobs = (
            None if self.logprobs is None else tuple(move(tensor) for tensor in self.logprobs)
        )
        return self._replace(
            tokens=move(self.tokens), invalid=move(self.invalid), logprobs=logprobs
        )

    def result(self) -> Result:
        invalid = self.invalid.numpy(force=True)
        logprobs = None
        if self.logprobs is not None:
            logprob, top_ids, top_logprobs, *of_ids = (
                tensor.numpy(force=True) for tensor in self.logprobs
            )
            logprobs = TopLogprobs(logprob, top_ids, top_logprobs, of_ids[0] if of_ids else None)
        return Result(
            tokens=self.tokens.numpy(force=True).astype(np.int32),
            invalid=invalid if invalid.any() else None,
            logprobs=logprobs,
            faults=self.faults,
        )


def sample(
    sampler: SamplerOps,
    logits: Tensor,
    sampling: Sampling,
    last_tokens: Tensor,
    processors: Processors | None = None,
    draws: SamplingArrays | None = None,
) -> SamplerOutput:
    """Choose one token per row of logits [S, V] (float32; overwritten).

    `last_tokens` [S] are those that the sequences end with, for penalties whose history lacks them. A row whose logits
    hold NaN or +inf, or nothing but -inf, is invalid and gets token 0. `processors` are needed if `sampling` names
    some; `draws` are those of `sampling`, where the device has them already.
    """
    if sampling.bias is not None:
        _add_bias(logits, sampling.bias, last_tokens)
    if sampling.penalties is not None:
        sampler.penalise(logits, sampling.penalties, last_tokens)
    faults: dict[int, str] = {}
    if sampling.processors:
        assert processors is not None, "a step names logit processors, and there are none"
        faults = processors.apply(logits, sampling.processors)
    for mask in (sampling.allowed, sampling.mask):
        if mask is not None:
            sampler.mask(logits, moved(mask.promise.words, logits.device), on(logits, mask.index))
            faults.update((int(mask.index[i]), fault) for i, fault in mask.promise.faults.items())
    if sampling.fixed is not None:
        _fix(logits, sampling.fixed)
    if faults:
        logits[list(faults)] = torch.nan  # so that they are invalid, whatever came behind
    chosen = sampler.tokens(logits, sampling if draws is None else draws)
    invalid = (
        chosen.max_logits.sub(chosen.max_logits) != 0
    )  # infinities and NaN; isfinite takes ten times as long
    chosen.tokens.masked_fill_(invalid, 0)
    logprobs = (
        None if sampling.logprobs is None else _logprobs(sampler, logits, chosen, sampling.logprobs)
    )
    return SamplerOutput(chosen.tokens, invalid, logprobs, tuple(faults.items()))


def _add_bias(logits: Tensor, bias: LogitBias, last_tokens: Tensor) -> None:
    index, values = on(logits, bias.index), on(logits, bias.values)
    if bias.after is not None:
        after = on(logits, bias.after)
        values = torch.where((after == ANY) | (after == last_tokens[index]), values, 0)
    logits.index_put_((index, on(logits, bias.tokens)), values, accumulate=True)


def _fix(logits: Tensor, fixed: Fixed) -> None:
    rows = on(logits, fixed.index)
    logits[rows] = -torch.inf
    logits[rows, on(logits, fixed.tokens)] = 0


def _logprobs(
    sampler: SamplerOps, logits: Tensor, chosen: SampledTokens, wanted: Logprobs
) -> tuple[Tensor, ...]:
    num_top = min(int(wanted.num_top.max(initial=0)), logits.shape[1])
    rows = on(logits, wanted.index)
    found = sampler.logprobs(logits, chosen, rows, num_top)
    if wanted.ids is None:
        return found
    own = logits[rows, chosen.tokens[rows]]
    return *found, id_logprobs(logits[rows], on(logits, wanted.ids), own, found.logprob)
