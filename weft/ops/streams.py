"""The operations on streams in torch, on any device: the specification of those of
`cpp/streams.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.elementwise import ACTIVATIONS, rms_norm
from weft.ops.protocol import Matrix, Norm, StreamRouter

LEAST_SQUARES = 1e-5  # mean of squares of a stream that is scaled up


class TorchStreams:
    """`StreamOps` in torch, computed in float32."""

    def open(self, x: Tensor, others: Tensor) -> Tensor:
        return torch.cat((x, _scaled(x, others).to(x.dtype).flatten(1)), dim=1)

    def factors(self, x: Tensor, router: StreamRouter, weight: Matrix) -> Tensor:
        normed = rms_norm(x.float(), *router.norm)
        few = torch.tanh(F.linear(normed, _all_of(router.weight)))
        return F.linear(few, _all_of(weight))

    def predict(self, x: Tensor, factors: Tensor) -> Tensor:
        num = int(factors.shape[1] ** 0.5)
        streams = x.float().view(len(x), num, -1)
        mixed = streams + factors.view(-1, num, num) @ streams
        return mixed.flatten(1).to(x.dtype)

    def correct(self, x: Tensor, y: Tensor, factors: Tensor, active: int) -> None:
        streams = x.view(len(x), factors.shape[1], -1)
        change = y.float() - streams[:, active].float()
        changed = streams.float() + (1 + factors)[:, :, None] * change[:, None]
        streams.copy_(changed)

    def add_normed(self, x: Tensor, y: Tensor, norm: Norm) -> None:
        others = x.view(len(x), -1, y.shape[1])[:, 1:]
        others.add_(rms_norm(y, *norm)[:, None])

    def close(self, x: Tensor, others: Tensor) -> Tensor:
        streams = torch.cat((x.float()[:, None], _scaled(x, others)), dim=1)
        return streams.mean(1).to(x.dtype)

    def cut_off(self, x: Tensor, deviations: float, activation: str) -> Tensor:
        wide = x.float()
        deviation, mean = torch.std_mean(wide, dim=-1, correction=0, keepdim=True)
        left = torch.relu(wide - mean - deviations * deviation)
        return ACTIVATIONS[activation](left).to(x.dtype)


def _scaled(x: Tensor, others: Tensor) -> Tensor:
    """[T, num - 1, size] float32"""
    size = x.shape[1]
    streams = others.float().view(len(x), -1, size)
    wanted = x.float().square().mean(-1).sqrt()[:, None, None]
    squares = streams.square().mean(-1, keepdim=True)
    return streams * wanted / squares.clamp(min=LEAST_SQUARES).sqrt()


def _all_of(matrix: Matrix) -> Tensor:
    (weight,) = matrix.tensors
    return weight
