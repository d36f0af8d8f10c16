"""Self-attention as a model sees it: projections here; norms of heads, rotation, KV and softmax behind
`PagedAttention`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import Linear
from weft.models.layers.norm import norm_weights, rms_norm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Norm, Ops


class Heads(NamedTuple):
    """What happens to queries and keys between the projections and attention."""

    rope: Rope
    q_norm: Norm | None  # over each head
    k_norm: Norm | None


class PagedAttention(Protocol):
    """Attention over what is cached for the requests of this step."""

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        """Norm and rotate queries and keys, store keys and values of this step's tokens, attend.

        qkv [T, (heads + 2 kv_heads) D] (may be overwritten) -> [T, heads D]. The tokens of each request see its cached
        tokens and those of this step up to themselves, within the layer's window. The scale is 1 / sqrt(D).
        """
        ...


class Attention:
    def __init__(self, config: ModelConfig, layer: int, rope: Rope, ops: Ops) -> None:
        self.layer = layer
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        projections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.norm = rms_norm(config.hidden_size, config.norm_eps, ops)
        self.qkv = Linear(config.hidden_size, projections, config.qkv_bias, ops)
        self.out = Linear(q_size, {"o_proj": config.hidden_size}, config.o_bias, ops)
        self.heads = Heads(rope, *(self._head_norm(config, ops) for _ in "qk"))

    def __call__(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """x + attention(norm(x)): [T, hidden] -> [T, hidden]"""
        qkv = self.qkv(x, norm=self.norm)
        return self.out(attention.forward(qkv, self.heads, self.layer), add=x)

    def weights(self, prefix: str) -> Weights:
        yield from norm_weights(self.norm, f"{prefix}.input_layernorm")
        yield from self.qkv.weights(f"{prefix}.self_attn")
        yield from self.out.weights(f"{prefix}.self_attn")
        if self.heads.q_norm and self.heads.k_norm:
            yield from norm_weights(self.heads.q_norm, f"{prefix}.self_attn.q_norm")
            yield from norm_weights(self.heads.k_norm, f"{prefix}.self_attn.k_norm")

    @staticmethod
    def _head_norm(config: ModelConfig, ops: Ops) -> Norm | None:
        return rms_norm(config.head_dim, config.norm_eps, ops) if config.qk_norm else None
