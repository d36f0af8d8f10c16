"""The parts of encoders: embeddings with positions and segments, attention over the whole prompt,
the plain feed-forward part, and the norm after each of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps, Tables


class BidirectionalAttention(Protocol):
    """Attention within the prompts of this step. Each prompt is in the step as a whole."""

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [T, 3 heads D] -> [T, heads D]. Every token attends to all tokens of its prompt. The
        scale is 1 / sqrt(D)."""
        ...


def encoder_norm(config: ModelConfig, ops: EncoderOps) -> CenteredNorm:
    return CenteredNorm(
        config.hidden_size,
        config.norm_eps,
        ops,
        has_bias=True,
    )


class Embeddings:
    """norm(token + position + segment type)"""

    def __init__(self, config: ModelConfig, ops: EncoderOps) -> None:
        self._ops = ops
        self.words = Embedding(config.vocab_size, config.hidden_size, ops)
        self.positions = Embedding(config.num_positions, config.hidden_size, ops)
        self.types = Embedding(config.num_token_types, config.hidden_size, ops)
        self.norm = encoder_norm(config, ops)
        self._tables = Tables(
            words=self.words.matrix,
            kinds=self.types.matrix,
            positions=self.positions.matrix,
            first_position=config.first_position,
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
    ) -> Tensor:
        """Each [T] -> [T, hidden]"""
        return self._ops.embed_sum(
            tokens,
            positions,
            types,
            self._tables,
            self.norm.norm,
        )

    def weights(self, prefix: str) -> Weights:
        yield from self.words.weights(f"{prefix}.word_embeddings")
        yield from self.positions.weights(f"{prefix}.position_embeddings")
        yield from self.types.weights(f"{prefix}.token_type_embeddings")
        yield from self.norm.weights(f"{prefix}.LayerNorm")


class EncoderLayer:
    """Two post-norm blocks: norm(x + f(x)), with attention and then with the feed-forward part."""

    def __init__(self, config: ModelConfig, ops: EncoderOps) -> None:
        hidden = config.hidden_size
        inner = config.intermediate_size
        self._ops = ops
        self._activation = config.activation
        self.qkv = Linear(
            hidden,
            dict.fromkeys(("query", "key", "value"), hidden),
            True,
            ops,
        )
        self.out = Linear(
            hidden,
            {"dense": hidden},
            True,
            ops,
        )
        self.out_norm = encoder_norm(config, ops)
        self.up = Linear(
            hidden,
            {"dense": inner},
            True,
            ops,
        )
        self.down = Linear(
            inner,
            {"dense": hidden},
            True,
            ops,
        )
        self.down_norm = encoder_norm(config, ops)

    def __call__(self, x: Tensor, attention: BidirectionalAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        # The kernels expect the sums in this form: a product adds its output to x itself.
        x = self.out_norm(x + self._attend(x, attention))
        return self.down_norm(x + self._feed_forward(x))

    def _attend(self, x: Tensor, attention: BidirectionalAttention) -> Tensor:
        qkv = self._ops.computed(self.qkv(x))
        return self.out(attention.forward(qkv))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(self._ops.activated(x, self.up.matrix, self._activation))

    def weights(self, prefix: str) -> Weights:
        yield from self.qkv.weights(f"{prefix}.attention.self")
        yield from self.out.weights(f"{prefix}.attention.output")
        yield from self.out_norm.weights(f"{prefix}.attention.output.LayerNorm")
        yield from self.up.weights(f"{prefix}.intermediate")
        yield from self.down.weights(f"{prefix}.output")
        yield from self.down_norm.weights(f"{prefix}.output.LayerNorm")
