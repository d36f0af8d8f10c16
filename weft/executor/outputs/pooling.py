"""From the hidden states of prompts to one vector each: a mean, a token's state, scores of labels,
or log probabilities of chosen tokens.

A mean over a prompt that comes in several chunks is a sum that is kept for each row from one step
to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import FloatArray, IntArray, LongArray, consecutive
from weft.config.model import ModelConfig
from weft.ops.sampling import on
from weft.plan.outputs import PoolingRequest
from weft.plan.step import Plan

Rows = Callable[[Tensor], Tensor]  # of a model: hidden states [n, H] -> [n, size]


class Pooler:
    """`normed` and `logits` are the model's; what they return is copied at once."""

    def __init__(
        self, config: ModelConfig, normed: Rows, logits: Rows, max_rows: int, device: torch.device
    ) -> None:
        self._config = config.pooling
        self._normed = normed
        self._logits = logits
        is_mean = config.pooling is not None and config.pooling.kind == "mean"
        self._sums = torch.zeros(
            max_rows if is_mean else 0, config.hidden_size, device=device
        )  # of rows, float32

    def __call__(self, plan: Plan, request: PoolingRequest, hidden: Tensor) -> FloatArray:
        """The vectors [E, size] of the requests in `request.index` that complete; of others nothing
        that means anything.

        `hidden` [T, H] are all of the step. A vector is cut, then normalised; scores become
        probabilities.
        """
        ends = np.cumsum(plan.lens, dtype=np.int64)[request.index]
        starts = ends - plan.lens[request.index]
        if request.labels is not None:
            vectors = self._label_logprobs(hidden[on(hidden, ends - 1)], request.labels)
        elif self._config is None:
            raise ValueError("this model generates; it was not started for embeddings")
        elif self._config.kind == "mean":
            vectors = self._means(plan, request, hidden, starts, ends)
        else:
            states = hidden[on(hidden, starts if self._config.kind == "cls" else ends - 1)]
            vectors = self._logits(states) if self._config.labels else self._normed(states)
        finished = self._finished(vectors.float(), request)
        pooled: FloatArray = finished.numpy(force=True)
        return pooled.copy()

    def _label_logprobs(self, states: Tensor, labels: IntArray) -> Tensor:
        logprobs = self._logits(states).float().log_softmax(-1)
        return logprobs.gather(1, on(states, labels))

    def _means(
        self,
        plan: Plan,
        request: PoolingRequest,
        hidden: Tensor,
        starts: LongArray,
        ends: LongArray,
    ) -> Tensor:
        lens = ends - starts
        states = self._normed(hidden[on(hidden, consecutive(starts, lens))]).float()
        rows = on(hidden, plan.rows[request.index])
        before = plan.starts[request.index]
        sums = self._sums[rows].mul_(on(hidden, before > 0)[:, None])
        sums.index_add_(0, on(hidden, np.repeat(np.arange(len(lens)), lens)), states)
        self._sums[rows] = sums
        return sums / on(hidden, before + lens)[:, None]

    def _finished(self, vectors: Tensor, request: PoolingRequest) -> Tensor:
        if request.labels is not None or self._config is None:
            return vectors
        own = self._config.normalize or self._config.task == "classify"
        chosen = on(vectors, np.where(request.normalize < 0, own, request.normalize > 0))[:, None]
        if self._config.task == "classify":
            return torch.where(chosen, _activated(vectors, self._config.activation), vectors)
        sizes = np.where(request.dimensions > 0, request.dimensions, vectors.shape[1])
        kept = torch.arange(vectors.shape[1], device=vectors.device) < on(vectors, sizes)[:, None]
        vectors = vectors.masked_fill(~kept, 0.0)
        return torch.where(chosen, F.normalize(vectors, dim=-1), vectors)


def _activated(scores: Tensor, activation: str) -> Tensor:
    match activation:
        case "softmax":
            return scores.softmax(-1)
        case "sigmoid":
            return scores.sigmoid()
    return scores
