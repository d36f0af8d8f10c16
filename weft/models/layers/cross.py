"""Attention of a decoder to the vectors of an encoder: the projections. `EncodedKv` has keys and
values, which the encoder makes of its own vectors (`models/vision/whisper.py`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class EncodedKv(Protocol):
    """Keys and values of what the encoder has read for each request of this step."""

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """softmax(q K / sqrt(D)) V for each head: q [T, heads D] -> [T, heads D]. Each token
        attends to all vectors of its request, and a result depends on nothing else."""
        ...


class CrossAttention:
    """out(attend(queries(x)))"""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops, encoded: EncodedKv) -> None:
        names = config.decoder.names
        spec = config.decoder.layer(layer).attention
        size = config.num_heads * config.head_dim
        self._ops = ops
        self._encoded = encoded
        self._layer = layer
        self.queries = Linear(config.hidden_size, {names.cross_queries: size}, spec.qkv_bias, ops)
        self.out = Linear(size, {names.out: config.hidden_size}, spec.out_bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        q = self._ops.computed(self.queries(x))
        return self.out(self._encoded.attend(q, self._layer))

    def weights(self, prefix: str) -> Weights:
        yield from self.queries.weights(prefix)
        yield from self.out.weights(prefix)
