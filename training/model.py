"""The model being trained: a Llama-architecture decoder in plain torch, with the tensor names and the conventions
(rotate-half rope, RMSNorm in float32, grouped KV heads, tied embedding) of a Hugging Face checkpoint, so that an export
is a plain copy. For training only: no KV cache. Knows nothing about data or optimizers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RMS_NORM_EPS = 1e-5
ROPE_THETA = 10000.0
# A guess is right if a model and its draft model draw the same token. Most requests draw at
# temperatures from 0 to 1, where the likeliest tokens decide: these count more if both distributions
# are sharpened.
TAUGHT_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 4096
    max_position: int = 2048


SHAPES = {
    "weft-nano": Shape(
        hidden_size=384,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=896,
    ),
    "weft-nano-draft": Shape(
        hidden_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
    ),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + RMS_NORM_EPS)
        return self.weight * (x32 * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group_size = shape.num_heads // shape.num_kv_heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.heads(self.q_proj(x)), cos, sin)
        k = rotate(self.heads(self.k_proj(x)), cos, sin).repeat_interleave(self.group_size, 1)
        v = self.heads(self.v_proj(x)).repeat_interleave(self.group_size, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * head_dim] -> [B, heads, T, head_dim]"""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The part that a checkpoint calls `model.`: token ids [B, T] to final hidden states [B, T, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rope_tables(shape.max_position, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Normal(0, 0.02); what is added to the residual stream is smaller the deeper the model."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight, std=0.02 / (2 * self.shape.num_layers) ** 0.5 if residual else 0.02
                )

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, vocab]."""
        hidden = self.model(ids, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])  # type: ignore[index]
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean loss in nats per token of predicting ids[:, 1:] from what stands before, ids [B, T + 1]."""
        logits = self(ids[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits.float(), ids[:, 1:].flatten())

    def taught_loss(self, ids: Tensor, likely: Tensor, chances: Tensor) -> Tensor:
        """Mean cross entropy in nats of what a teacher expects behind each of ids [B, T + 1] but the last one: tokens
        `likely` [B, T, K] with these chances, at TAUGHT_TEMPERATURE. A place whose chances are 0 does not count."""
        expected = (self(ids[:, :-1]).float() / TAUGHT_TEMPERATURE).log_softmax(-1)
        total = (chances * expected.gather(-1, likely)).sum()
        return -total / chances.sum()  # type: ignore[no-any-return]


def rope_tables(num_positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim] of the rotation angles, each angle twice: for both halves of a head."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half convention: x [B, heads, T, head_dim] with tables [T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
