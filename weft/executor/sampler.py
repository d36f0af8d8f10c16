"""From logits to tokens.

The order is: logit bias · penalties · mask · (log probabilities are taken here) · the choice of a token, which is
defined in `ops/sampling.py` and has a twin for each kind of device. No row depends on another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.executor.plan import LogitBias, Logprobs, Penalties, Result, Sampling, TopLogprobs
from weft.ops.sampling import Choose, Chosen, on


class Sampled(NamedTuple):
    tokens: Tensor  # [S] int64
    invalid: Tensor  # [S] bool
    logprobs: TopLogprobs | None

    def result(self) -> Result:
        invalid = self.invalid.numpy(force=True)
        return Result(
            tokens=self.tokens.numpy(force=True).astype(np.int32),
            invalid=invalid if invalid.any() else None,
            logprobs=self.logprobs,
        )


def sample(choose: Choose, logits: Tensor, sampling: Sampling, last_tokens: Tensor) -> Sampled:
    """Choose one token per row of logits [S, V] (float32; overwritten).

    `last_tokens` [S] are those that the sequences end with, for penalties whose history lacks them. A row whose logits
    hold NaN or +inf, or nothing but -inf, is invalid and gets token 0.
    """
    if sampling.bias is not None:
        _add_bias(logits, sampling.bias)
    if sampling.penalties is not None:
        _penalise(logits, sampling.penalties, last_tokens)
    if (mask := sampling.mask) is not None:
        choose.mask(logits, torch.from_numpy(mask.words).to(logits.device), on(logits, mask.index))
    chosen = choose.tokens(logits, sampling)
    invalid = chosen.peaks.sub(chosen.peaks) != 0  # infinities and NaN; isfinite takes ten times as long
    chosen.tokens.masked_fill_(invalid, 0)
    logprobs = None if sampling.logprobs is None else _logprobs(choose, logits, chosen, sampling.logprobs)
    return Sampled(chosen.tokens, invalid, logprobs)


def _add_bias(logits: Tensor, bias: LogitBias) -> None:
    place = (on(logits, bias.index), on(logits, bias.tokens))
    logits.index_put_(place, on(logits, bias.values), accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties, last_tokens: Tensor) -> None:
    """Lower the logits of tokens seen before. Repetition divides positive and multiplies negative ones, for tokens of
    prompt and output; frequency is subtracted per occurrence in the output, presence once if there is any.

    Sources: CTRL, arXiv:1909.05858, section 4.1; the OpenAI API reference.
    """
    vocab_size = logits.shape[1]
    lens = np.diff(penalties.offsets)
    owner = np.repeat(np.arange(len(lens)), lens)
    in_output = np.arange(len(penalties.history)) >= penalties.output_starts[owner]
    rows = on(logits, penalties.index)
    lacking = on(logits, np.flatnonzero(penalties.lacks_last))
    # One key per (penalised request, token) seen; `counts` tells how often it was generated.
    known = on(logits, owner * vocab_size + penalties.history)
    keys = torch.cat((known, lacking * vocab_size + last_tokens[rows[lacking]]))
    weights = torch.cat((on(logits, in_output), torch.ones_like(lacking, dtype=torch.bool))).float()
    keys, inverse = torch.unique(keys, return_inverse=True)
    counts = torch.zeros(len(keys), device=logits.device).index_add_(0, inverse, weights)
    request = keys // vocab_size
    place = (rows[request], keys % vocab_size)
    score = logits[place]
    repetition = on(logits, penalties.repetition)[request]
    score = torch.where(score > 0, score / repetition, score * repetition)
    score -= counts * on(logits, penalties.frequency)[request]
    score -= (counts > 0) * on(logits, penalties.presence)[request]
    logits[place] = score


def _logprobs(choose: Choose, logits: Tensor, chosen: Chosen, wanted: Logprobs) -> TopLogprobs:
    num_top = min(int(wanted.num_top.max(initial=0)), logits.shape[1])
    found = choose.logprobs(logits, chosen, on(logits, wanted.index), num_top)
    return TopLogprobs(*(tensor.numpy(force=True) for tensor in found))
