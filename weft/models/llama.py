"""The Llama decoder. Mistral, Qwen2 and Qwen3 are the same with other flags in `ModelConfig`: biases, a sliding window,
norms of queries and keys."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.attention import Attention, PagedAttention
from weft.models.layers.embedding import Embedding, Head
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Empty, Weights


class LlamaLayer:
    def __init__(self, config: ModelConfig, layer: int, empty: Empty) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, empty)
        self.attention = Attention(config, layer, empty)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, empty)
        self.mlp = GatedMLP(config, empty)

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, attention)
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.attention_norm.weights(f"{prefix}.input_layernorm")
        yield from self.attention.weights(f"{prefix}.self_attn")
        yield from self.mlp_norm.weights(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.weights(f"{prefix}.mlp")


class Llama:
    def __init__(self, config: ModelConfig, empty: Empty) -> None:
        self.embedding = Embedding(config.vocab_size, config.hidden_size, empty)
        self.rope = Rope(config, self.embedding.weight.device)
        self.layers = [LlamaLayer(config, layer, empty) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, empty)
        self.head = Head(self.embedding, config.tie_embeddings, empty)

    def forward(self, tokens: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        x = self.embedding(tokens)
        rotation = self.rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attention)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def weights(self) -> Weights:
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield from self.norm.weights("model.norm")
        yield from self.head.weights("lm_head")
