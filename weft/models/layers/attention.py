"""Self-attention as a model sees it: projections here; norms of heads, rotation, KV and softmax
behind `PagedAttention`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Norm, Ops


class Heads(NamedTuple):
    """The work on queries and keys between the projections and attention."""

    rope: Rope
    q_norm: Norm | None  # over each head
    k_norm: Norm | None


class PagedAttention(Protocol):
    """Attention over the cached tokens of the requests of this step."""

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        """Norm and rotate queries and keys, store keys and values of this step's tokens, attend.

        qkv [T, (heads + 2 kv_heads) D] (may be overwritten) -> [T, heads D]. The tokens of each
        request see its cached tokens, and those of this step up to themselves, within the layer's
        window. The scale is 1 / sqrt(D).
        """
        ...


class Attention:
    """out(attention(qkv(x)))"""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rope: Rope,
        ops: Ops,
    ) -> None:
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        projections = {
            "q_proj": q_size,
            "k_proj": kv_size,
            "v_proj": kv_size,
        }
        self._ops = ops
        self._layer = layer
        self.qkv = Linear(
            config.hidden_size,
            projections,
            config.qkv_bias,
            ops,
        )
        self.out = Linear(
            q_size,
            {"o_proj": config.hidden_size},
            config.o_bias,
            ops,
        )
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        self._heads = Heads(rope, None, None)
        if config.qk_norm:
            self.q_norm = RmsNorm(config.head_dim, config.norm_eps, ops)
            self.k_norm = RmsNorm(config.head_dim, config.norm_eps, ops)
            self._heads = Heads(rope, self.q_norm.norm, self.k_norm.norm)

    def __call__(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        qkv = self._ops.computed(self.qkv(x))
        return self.out(attention.forward(qkv, self._heads, self._layer))

    def weights(self, prefix: str) -> Weights:
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weights(f"{prefix}.q_norm")
            yield from self.k_norm.weights(f"{prefix}.k_norm")
