"""From the hidden states of prompts to one vector each: a mean, the state of a token, scores of
labels, or log probabilities of chosen tokens.

For a mean over a prompt in several chunks, the sum of each row is kept between steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.arrays import FloatArray, IntArray, LongArray, consecutive
from weft.config.model import ModelConfig
from weft.ops.sampling import on
from weft.plan.outputs import PoolingRequest
from weft.plan.step import Plan

TOKENS_AT_ONCE = 64  # of which the numbers for a vocabulary are made

Rows = Callable[[Tensor], Tensor]  # of a model: hidden states [n, H] -> [n, size]
# Of a model: hidden states [T, H] of a step, indices of its tokens [n] -> [n, size]
RowsAt = Callable[[Tensor, Tensor], Tensor]


class Pooler:
    """`normed` and `logits` are functions of the model; their results are copied at once."""

    def __init__(
        self,
        config: ModelConfig,
        normed: Rows,
        logits: RowsAt,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._config = config.pooling
        self._normed = normed
        self._logits = logits
        num_sums = 0
        if config.pooling is not None and config.pooling.kind == "mean":
            num_sums = max_rows
        self._sums = torch.zeros(
            num_sums,
            config.hidden_size,
            device=device,
        )  # [max_rows, H] float32, sums of each row's tokens so far

    def __call__(
        self,
        plan: Plan,
        request: PoolingRequest,
        hidden: Tensor,
    ) -> FloatArray:
        """The vectors [E, size] of the requests in `request.index` that complete; those of other
        requests mean nothing.

        `hidden` [T, H] are the states of the whole step. A vector is cut, then normalised; scores
        become probabilities.
        """
        #   hidden   | request 0    | request 1 | ...
        #             start       end
        all_ends = np.cumsum(plan.lens, dtype=np.int64)
        ends = all_ends[request.index]
        starts = ends - plan.lens[request.index]
        vectors = self._vectors(
            plan,
            request,
            hidden,
            starts,
            ends,
        )
        finished = self._finished(vectors.float(), request)
        pooled: FloatArray = finished.numpy(force=True)
        return pooled.copy()

    def sizes(
        self,
        plan: Plan,
        request: PoolingRequest,
    ) -> IntArray | None:
        """[E] the numbers of each vector that count; None: all."""
        if self._config is None or self._config.kind != "tokens":
            return None
        return (plan.lens[request.index] * self._config.size).astype(np.int32)

    def _vectors(
        self,
        plan: Plan,
        request: PoolingRequest,
        hidden: Tensor,
        starts: LongArray,
        ends: LongArray,
    ) -> Tensor:
        """[E, size] as the model computes them. Request i has the tokens from `starts[i]` to
        `ends[i]`."""
        config = self._config
        if request.labels is not None:
            last = on(hidden, ends - 1)
            return self._label_logprobs(hidden, last, request.labels)
        if config is None:
            raise ValueError("this model generates; it was not started for embeddings")
        if config.kind == "mean":
            means = self._means(
                plan,
                request,
                hidden,
                starts,
                ends,
            )
            if config.labels:
                return self._logits(means, on(hidden, np.arange(len(starts))))
            return means
        if config.kind == "sparse":
            return self._sparse(hidden, starts, ends)
        if config.kind == "tokens":
            return self._of_tokens(hidden, starts, ends)
        chosen = ends - 1
        if config.kind == "cls":
            chosen = starts
        places = on(hidden, chosen)
        if config.labels:
            return self._logits(hidden, places)
        return self._normed(hidden[places])

    def _label_logprobs(
        self,
        hidden: Tensor,
        places: Tensor,
        labels: IntArray,
    ) -> Tensor:
        logits = self._logits(hidden, places).float()
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, on(hidden, labels))

    def _means(
        self,
        plan: Plan,
        request: PoolingRequest,
        hidden: Tensor,
        starts: LongArray,
        ends: LongArray,
    ) -> Tensor:
        lens = ends - starts
        places = on(hidden, consecutive(starts, lens))
        states = self._normed(hidden[places]).float()
        rows = on(hidden, plan.rows[request.index])
        before = plan.starts[request.index]
        # If a prompt begins here, the sum of its row belongs to another request, and is multiplied
        # by 0.
        goes_on = on(hidden, before > 0)
        sums = self._sums[rows].mul_(goes_on[:, None])
        owners = np.repeat(np.arange(len(lens)), lens)  # request of each state, 0..E-1
        sums.index_add_(0, on(hidden, owners), states)
        self._sums[rows] = sums
        num_tokens = on(hidden, before + lens)
        return sums / num_tokens[:, None]

    def _sparse(
        self,
        hidden: Tensor,
        starts: LongArray,
        ends: LongArray,
    ) -> Tensor:
        """[E, vocab] the largest number of each token of the vocabulary over a prompt, as
        log(1 + relu(number)). Source: arXiv:2109.10086, 3.1."""
        found = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            largest: Tensor | None = None
            # A few tokens at a time: each has a number for the full vocabulary.
            for first in range(start, end, TOKENS_AT_ONCE):
                places = np.arange(first, min(first + TOKENS_AT_ONCE, end))
                numbers = self._logits(hidden, on(hidden, places)).amax(0)
                largest = numbers if largest is None else torch.maximum(largest, numbers)
            assert largest is not None
            found.append(largest.relu().log1p())
        return torch.stack(found)

    def _of_tokens(
        self,
        hidden: Tensor,
        starts: LongArray,
        ends: LongArray,
    ) -> Tensor:
        """[E, most tokens * size] the vectors of the tokens of each prompt, of length 1, one after
        the other; zeros follow those of shorter prompts."""
        places = np.concatenate([np.arange(*each) for each in zip(starts, ends, strict=True)])
        vectors = F.normalize(self._logits(hidden, on(hidden, places)), dim=-1)
        lens = (ends - starts).tolist()
        return pad_sequence(list(vectors.split_with_sizes(lens)), batch_first=True).flatten(1)

    def _finished(
        self,
        vectors: Tensor,
        request: PoolingRequest,
    ) -> Tensor:
        """Cut and normalise embeddings, and turn scores into probabilities, for requests that want
        it."""
        config = self._config
        if request.labels is not None or config is None or config.kind == "tokens":
            return vectors
        # Below 0: the model's default.
        default = config.normalize or config.task == "classify"
        wants = np.where(request.normalize < 0, default, request.normalize > 0)
        chosen = on(vectors, wants)[:, None]
        if config.task == "classify":
            activated = _activated(vectors, config.activation)
            return torch.where(chosen, activated, vectors)
        size = vectors.shape[1]
        sizes = np.where(request.dimensions > 0, request.dimensions, size)
        columns = torch.arange(size, device=vectors.device)
        is_kept = columns < on(vectors, sizes)[:, None]
        # The other dimensions become 0, so that the norm is that of the shortened vector.
        vectors = vectors.masked_fill(~is_kept, 0.0)
        normalized = F.normalize(vectors, dim=-1)
        return torch.where(chosen, normalized, vectors)


def _activated(scores: Tensor, activation: str) -> Tensor:
    match activation:
        case "softmax":
            return scores.softmax(-1)
        case "sigmoid":
            return scores.sigmoid()
    return scores
