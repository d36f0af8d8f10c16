"""The Llama decoder. Mistral, Qwen2 and Qwen3 are the same with other flags in `ModelConfig`:
biases, a sliding window, norms of queries and keys."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.attention import Attention, PagedAttention
from weft.models.layers.embedding import Embedding
from weft.models.layers.head import make_head
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class LlamaLayer:
    """Two blocks that norm their input and add their output to the residual stream (pre-norm)."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rope: Rope,
        ops: Ops,
    ) -> None:
        self.attention_norm = RmsNorm(config.hidden_size, config.norm_eps, ops)
        self.attention = Attention(config, layer, rope, ops)
        self.mlp_norm = RmsNorm(config.hidden_size, config.norm_eps, ops)
        self.mlp = GatedMLP(config, ops)

    def __call__(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        x = x + self.attention(self.attention_norm(x), attention)
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.attention_norm.weights(f"{prefix}.input_layernorm")
        yield from self.attention.weights(f"{prefix}.self_attn")
        yield from self.mlp_norm.weights(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.weights(f"{prefix}.mlp")


class Llama:
    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        rope = Rope(config)
        self._ops = ops
        self.embedding = Embedding(config.vocab_size, config.hidden_size, ops)
        self.layers = [LlamaLayer(config, layer, rope, ops) for layer in range(config.num_layers)]
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, ops)
        self.head = make_head(config, self.embedding, ops)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(tokens, vectors)
        for layer in self.layers:
            x = layer(x, attention)
        return self._ops.computed(x)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._ops.computed(self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None, "this model has neither logits nor labels"
        return self.head(self.norm(hidden))

    def weights(self) -> Weights:
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield from self.norm.weights("model.norm")
        if self.head is not None:
            yield from self.head.weights()
