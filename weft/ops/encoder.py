"""What encoders are made of besides `Ops`: three embeddings in one, norms with a mean and a bias,
activations without a gate, attention within whole prompts. In torch, on any device;
`cpp/encoder.py` records programs for the CPU kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.plain import PlainOps
from weft.ops.protocol import Matrix, Ops


class LayerNorm(NamedTuple):
    """(x - mean(x)) / deviation(x) * weight + bias. Source: arXiv:1607.06450."""

    weight: Tensor  # [H]
    bias: Tensor  # [H]
    eps: float


class Tables(NamedTuple):
    """What a token's vector is the sum of; made by `Ops.matrix` as `precise`."""

    words: Matrix
    kinds: Matrix  # of segments
    positions: Matrix
    first_position: int  # row of position 0


class EncoderOps(Ops, Protocol):
    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        """layer_norm(word + kind + position): each [T] -> [T, H]"""
        ...

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """[T, H] -> [T, H], in float32 inside"""
        ...

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        """activation(W x + bias): [T, in] -> [T, out]; the activation is one of `ACTIVATIONS`"""
        ...


class PlainEncoderOps(PlainOps):
    """`EncoderOps` in plain torch."""

    def embed_sum(
        self, tokens: Tensor, positions: Tensor, kinds: Tensor, tables: Tables, norm: LayerNorm
    ) -> Tensor:
        content = self.embed(tokens, tables.words) + self.embed(kinds, tables.kinds)
        return self.layer_norm(
            content + self.embed(positions + tables.first_position, tables.positions), norm
        )

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), *norm)

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        return ACTIVATIONS[activation](self.linear(x, weight))


def gelu(x: Tensor) -> Tensor:
    """x Φ(x), exactly. Source: arXiv:1606.08415."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same by way of tanh, as some models were trained with."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": torch.relu,
    "tanh": torch.tanh,
}
