"""Self-attention as a model sees it: projections and rotation here, KV and softmax behind `PagedAttention`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RMSNorm
from weft.models.layers.weight import Empty, Weights
from weft.ops.elementwise import apply_rotary


class PagedAttention(Protocol):
    """Attention over what is cached for the requests of this step."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store k and v of this step's tokens, then attend: q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D].

        The tokens of each request see its cached tokens and those of this step up to themselves, within the layer's
        window. The scale is 1 / sqrt(D).
        """
        ...


class Attention:
    def __init__(self, config: ModelConfig, layer: int, empty: Empty) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, config.qkv_bias, empty
        )
        self.out = Linear(q_size, {"o_proj": config.hidden_size}, config.o_bias, empty)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, empty) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, empty) if config.qk_norm else None

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention) -> Tensor:
        """x [T, hidden] -> [T, hidden]"""
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv(x).split_with_sizes(self.qkv.sizes, -1))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
        return self.out(attention.forward(q, k, v, self.layer).flatten(1))

    def weights(self, prefix: str) -> Weights:
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)
        if self.q_norm and self.k_norm:
            yield from self.q_norm.weights(f"{prefix}.q_norm")
            yield from self.k_norm.weights(f"{prefix}.k_norm")
