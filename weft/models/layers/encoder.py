"""The parts of encoders: embeddings with positions and segments, attention over a whole prompt, the plain feed-forward
part, and the norms behind each of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weights, vector
from weft.ops.encoder import EncoderOps, LayerNorm, Tables


class BidirectionalAttention(Protocol):
    """Attention within the prompts of this step, each of which is there whole."""

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [T, 3 heads D] -> [T, heads D]. Every token sees all tokens of its prompt. The scale is 1 / sqrt(D)."""
        ...


class Embeddings:
    """norm(token + position + kind of segment)"""

    def __init__(self, config: ModelConfig, ops: EncoderOps) -> None:
        self._ops = ops
        self.words = Embedding(config.vocab_size, config.hidden_size, ops)
        self.positions = Embedding(config.num_positions, config.hidden_size, ops)
        self.types = Embedding(config.num_token_types, config.hidden_size, ops)
        self.norm = layer_norm(config, ops)
        words, kinds, positions = (
            table.matrix for table in (self.words, self.types, self.positions)
        )
        self._tables = Tables(words, kinds, positions, config.first_position)

    def __call__(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Each [T] -> [T, hidden]"""
        return self._ops.embed_sum(tokens, positions, types, self._tables, self.norm)

    def weights(self, prefix: str) -> Weights:
        yield from self.words.weights(f"{prefix}.word_embeddings")
        yield from self.positions.weights(f"{prefix}.position_embeddings")
        yield from self.types.weights(f"{prefix}.token_type_embeddings")
        yield from layer_norm_weights(self.norm, f"{prefix}.LayerNorm")


class EncoderLayer:
    def __init__(self, config: ModelConfig, ops: EncoderOps) -> None:
        self._ops = ops
        self._activation = config.activation
        hidden, inner = config.hidden_size, config.intermediate_size
        self.qkv = Linear(hidden, dict.fromkeys(("query", "key", "value"), hidden), True, ops)
        self.out = Linear(hidden, {"dense": hidden}, True, ops)
        self.out_norm = layer_norm(config, ops)
        self.up = Linear(hidden, {"dense": inner}, True, ops)
        self.down = Linear(inner, {"dense": hidden}, True, ops)
        self.down_norm = layer_norm(config, ops)

    def __call__(self, x: Tensor, attention: BidirectionalAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        x = self._ops.layer_norm(self.out(attention.forward(self.qkv(x)), add=x), self.out_norm)
        inner = self._ops.activated(x, self.up.matrix, self._activation)
        return self._ops.layer_norm(self.down(inner, add=x), self.down_norm)

    def weights(self, prefix: str) -> Weights:
        yield from self.qkv.weights(f"{prefix}.attention.self")
        yield from self.out.weights(f"{prefix}.attention.output")
        yield from layer_norm_weights(self.out_norm, f"{prefix}.attention.output.LayerNorm")
        yield from self.up.weights(f"{prefix}.intermediate")
        yield from self.down.weights(f"{prefix}.output")
        yield from layer_norm_weights(self.down_norm, f"{prefix}.output.LayerNorm")


def layer_norm(config: ModelConfig, ops: EncoderOps) -> LayerNorm:
    return LayerNorm(
        ops.vector(config.hidden_size), ops.vector(config.hidden_size), config.norm_eps
    )


def layer_norm_weights(norm: LayerNorm, prefix: str) -> Weights:
    yield vector(f"{prefix}.weight", norm.weight)
    yield vector(f"{prefix}.bias", norm.bias)
