"""Token embedding and the head that turns hidden states into logits; with tied weights they are one matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.models.layers.weight import Empty, Weight, Weights


class Embedding:
    def __init__(self, vocab_size: int, hidden_size: int, empty: Empty) -> None:
        self.weight = empty(vocab_size, hidden_size)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, hidden]"""
        return F.embedding(tokens, self.weight)

    def weights(self, prefix: str) -> Weights:
        yield Weight(f"{prefix}.weight", self.weight)


class Head:
    def __init__(self, embedding: Embedding, tied: bool, empty: Empty) -> None:
        self.tied = tied
        self.weight = embedding.weight if tied else empty(*embedding.weight.shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> logits [S, vocab], float32"""
        return F.linear(hidden, self.weight).float()

    def weights(self, prefix: str) -> Weights:
        if not self.tied:
            yield Weight(f"{prefix}.weight", self.weight)
