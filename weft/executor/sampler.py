"""From logits to tokens.

The order is: logit bias · penalties · (log probabilities are taken here) · temperature · top-k · top-p of what top-k
left, renormalised · min-p · a draw. Top-k, top-p and min-p each keep the tokens above some logit, so together they are
one threshold per row; tokens of equal logit are kept or dropped together. The draw takes the maximum of logit + Gumbel
noise, and the noise depends on seed, position and token id alone (`ops/noise.py`): no row depends on another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.executor.plan import FloatArray, IntArray, LogitBias, Logprobs, Penalties, Result, Sampling, TopLogprobs
from weft.ops.noise import gumbel, row_keys

BLOCK_SIZE = 1 << 19  # logits that are drawn from together: they stay in the cache from one operation to the next
FIRST_CANDIDATES = 128  # tokens that are sorted for top-p at first; if their mass is too small, eight times as many


class Sampled(NamedTuple):
    tokens: Tensor  # [S] int64
    invalid: Tensor  # [S] bool
    logprobs: TopLogprobs | None

    def result(self) -> Result:
        invalid = self.invalid.numpy(force=True)
        return Result(
            tokens=self.tokens.to(torch.int32).numpy(force=True),
            invalid=invalid if invalid.any() else None,
            logprobs=self.logprobs,
        )


def sample(logits: Tensor, sampling: Sampling, last_tokens: Tensor) -> Sampled:
    """Choose one token per row of logits [S, V] (float32; overwritten).

    `last_tokens` [S] are those that the sequences end with, for penalties whose history lacks them. A row whose logits
    hold NaN or +inf, or nothing but -inf, is invalid and gets token 0.
    """
    if sampling.bias is not None:
        _add_bias(logits, sampling.bias)
    if sampling.penalties is not None:
        _penalise(logits, sampling.penalties, last_tokens)
    peaks, tokens = logits.max(dim=-1)  # a NaN is the maximum of its row
    if not sampling.is_greedy:
        rows = np.flatnonzero(sampling.temperature > 0)
        block_len = max(1, BLOCK_SIZE // logits.shape[1])
        for begin in range(0, len(rows), block_len):
            block = rows[begin : begin + block_len]
            index = _on(logits, block)
            tokens[index] = _draw(logits[index], peaks[index], sampling, block)
    invalid = ~peaks.isfinite()
    tokens.masked_fill_(invalid, 0)
    logprobs = None if sampling.logprobs is None else _logprobs(logits, tokens, sampling.logprobs)
    return Sampled(tokens, invalid, logprobs)


def _add_bias(logits: Tensor, bias: LogitBias) -> None:
    place = (_on(logits, bias.index), _on(logits, bias.tokens))
    logits.index_put_(place, _on(logits, bias.values), accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties, last_tokens: Tensor) -> None:
    """Lower the logits of tokens seen before. Repetition divides positive and multiplies negative ones, for tokens of
    prompt and output; frequency is subtracted per occurrence in the output, presence once if there is any.

    Sources: CTRL, arXiv:1909.05858, section 4.1; the OpenAI API reference.
    """
    vocab_size = logits.shape[1]
    lens = np.diff(penalties.offsets)
    owner = np.repeat(np.arange(len(lens)), lens)
    in_output = np.arange(len(penalties.history)) >= penalties.output_starts[owner]
    rows = _on(logits, penalties.index)
    lacking = _on(logits, np.flatnonzero(penalties.lacks_last))
    # One key per (penalised request, token) seen; `counts` tells how often it was generated.
    known = _on(logits, owner * vocab_size + penalties.history)
    keys = torch.cat((known, lacking * vocab_size + last_tokens[rows[lacking]]))
    weights = torch.cat((_on(logits, in_output), torch.ones_like(lacking, dtype=torch.bool))).float()
    keys, inverse = torch.unique(keys, return_inverse=True)
    counts = torch.zeros(len(keys), device=logits.device).index_add_(0, inverse, weights)
    request = keys // vocab_size
    place = (rows[request], keys % vocab_size)
    score = logits[place]
    repetition = _on(logits, penalties.repetition)[request]
    score = torch.where(score > 0, score / repetition, score * repetition)
    score -= counts * _on(logits, penalties.frequency)[request]
    score -= (counts > 0) * _on(logits, penalties.presence)[request]
    logits[place] = score


def _draw(x: Tensor, peaks: Tensor, sampling: Sampling, rows: NDArray[np.int64]) -> Tensor:
    """One token for each of the sampling requests `rows`: their logits x [n, V] (overwritten), maxima `peaks` [n]."""
    temperature = _on(x, sampling.temperature[rows])
    x.sub_(peaks[:, None]).div_(temperature[:, None])  # at most 0, however small the temperature
    cut = threshold(x, sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows])
    if cut is not None:
        x.masked_fill_(x < cut[:, None], -torch.inf)
    keys = torch.from_numpy(row_keys(sampling.seeds[rows], sampling.positions[rows])).to(x.device)
    return x.add_(gumbel(keys, x.shape[1])).argmax(dim=-1)


def threshold(x: Tensor, top_k: IntArray, top_p: FloatArray, min_p: FloatArray) -> Tensor | None:
    """The smallest logit of each row that top-k, top-p and min-p keep, [n]; None if all keep everything.

    x [n, V] are logits after temperature, with maximum 0. top_k 0, top_p 1 and min_p 0 are off.
    """
    with np.errstate(divide="ignore"):
        lowest = np.log(min_p)
    top_k = np.where((top_k > 0) & (top_k < x.shape[1]), top_k, 0)
    cutting = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(cutting):
        return _on(x, lowest) if min_p.any() else None
    cut, index = _on(x, lowest), _on(x, cutting)
    cut[index] = torch.maximum(cut[index], _top_cut(x[index], top_k[cutting], top_p[cutting]))
    return cut


def _top_cut(x: Tensor, top_k: IntArray, top_p: FloatArray) -> Tensor:
    """`threshold` without min-p, for rows that top-k or top-p cut.

    Only the largest logits are sorted: as many as top-k asks for, and as hold the mass that top-p asks for.
    """
    vocab_size = x.shape[1]
    num = max(int(top_k.max()), FIRST_CANDIDATES if (top_k == 0).any() else 0)
    limited, k, p = _on(x, top_k > 0), _on(x, top_k).long(), _on(x, top_p)
    while True:
        num = min(num, vocab_size)
        values = x.topk(num, dim=-1).values
        kth = values.gather(1, (k - 1).clamp_(min=0)[:, None]).masked_fill_(~limited[:, None], -torch.inf)
        if (top_p >= 1).all():
            return kth[:, 0]
        total = x.exp().masked_fill_(x < kth, 0).sum(dim=-1, keepdim=True)
        mass = values.exp().masked_fill_(values < kth, 0)
        inside = (mass.cumsum(dim=-1) - mass < p[:, None] * total).sum(dim=-1, keepdim=True)
        if num == vocab_size or ((inside[:, 0] < num) | limited | (p >= 1)).all():
            nucleus = values.gather(1, inside.clamp_(min=1) - 1).masked_fill_((p >= 1)[:, None], -torch.inf)
            return torch.maximum(kth, nucleus)[:, 0]
        num *= 8


def _logprobs(logits: Tensor, tokens: Tensor, wanted: Logprobs) -> TopLogprobs:
    rows = _on(logits, wanted.index)
    wide = logits[rows]
    norm = wide.logsumexp(dim=-1, keepdim=True)
    top = wide.topk(min(int(wanted.num_top.max(initial=0)), wide.shape[1]), dim=-1)
    return TopLogprobs(
        logprob=(wide.gather(1, tokens[rows, None]) - norm)[:, 0].numpy(force=True),
        top_ids=top.indices.to(torch.int32).numpy(force=True),
        top_logprobs=(top.values - norm).numpy(force=True),
    )


def _on(like: Tensor, array: NDArray[np.generic]) -> Tensor:
    """The array on the device of `like`; indices as int64."""
    return torch.from_numpy(array.astype(np.int64 if array.dtype.kind == "i" else array.dtype)).to(like.device)
