"""What encoders are made of besides `Ops`: norms with a mean and a bias, activations without a gate. Torch computes
them, on any device."""

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


class EncoderOps(Ops, Protocol):
    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """[T, H] -> [T, H], in float32 inside"""
        ...

    def activated(self, x: Tensor, weight: Matrix, activation: str) -> Tensor:
        """activation(W x + bias): [T, in] -> [T, out]; the activation is one of `ACTIVATIONS`"""
        ...


class PlainEncoderOps(PlainOps):
    """`EncoderOps` in plain torch."""

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), *norm)

    def activated(self, x: Tensor, weight: Matrix, activation: str) -> Tensor:
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
