"""Experts with random weights, the same for every `Ops`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.codes import FORMATS, random_codes
from weft.models.layers.linear import INPUTS, OUTPUTS
from weft.ops.cpp.abi import StepArgs
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.protocol import Experts, Matrix, Ops, Router
from weft.ops.routing import Choice, Scores


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator)


SIX = Choice(num_experts=6, num_chosen=3, scores=Scores.SOFTMAX, is_normed=True)


@dataclass(frozen=True)
class Shape:
    """Sizes of a router and its experts."""

    hidden: int = 96
    inner: int = 45
    choice: Choice = SIX
    activation: str = "silu"
    bias: bool = False
    codes: str = ""  # the name of a format: weights come as codes of it

    def router(self, ops: Ops) -> Router:
        num = self.choice.num_experts
        matrix = ops.exact_matrix(self.hidden, num, bias=self.bias)
        matrix.put(0, random(num, self.hidden, seed=1) / self.hidden**0.5)
        if self.bias:
            matrix.put_bias(0, random(num, seed=2))
        return Router(matrix, self.choice, None, layer=0)

    def experts(self, ops: Ops) -> Experts:
        num = self.choice.num_experts
        gate_up = ops.expert_matrix(
            num,
            self.hidden,
            (self.inner, self.inner),
            bias=self.bias,
            gated=True,
            shard=OUTPUTS,
        )
        down = ops.expert_matrix(num, self.inner, (self.hidden,), bias=self.bias, shard=INPUTS)
        self._fill(gate_up, self.hidden)
        self._fill(down, self.inner)
        return Experts(gate_up, down, self.activation)

    def _fill(self, matrix: Matrix, in_size: int) -> None:
        if self.codes:
            for part in range(len(matrix.sizes)):
                matrix.keep_as(part, FORMATS[self.codes])
        for part, size in enumerate(matrix.sizes):
            if self.codes:
                matrix.put_codes(part, random_codes(FORMATS[self.codes], size, in_size, seed=part))
            else:
                matrix.put(part, random(size, in_size, seed=10 + part) / in_size**0.5)
            if self.bias:
                matrix.put_bias(part, random(size, seed=100 + part))


def mixed(ops: Ops, shape: Shape, x: Tensor) -> Tensor:
    """The residual stream behind the experts, by plain operations."""
    routed = ops.route(x, shape.router(ops))
    return x.clone() + 0.5 * ops.experts(x, routed, shape.experts(ops))


class Program:
    """The same, recorded by the kernels."""

    def __init__(self, kernels: Library, ops: CppOps, shape: Shape, capacity: int) -> None:
        self._kernels = kernels
        self.router = shape.router(ops)
        self.experts = shape.experts(ops)
        ops.begin(capacity)
        self._x = ops.recorder.buffer(shape.hidden)
        self._residual = ops.recorder.buffer(shape.hidden)
        routed = ops.route(self._x, self.router)
        total = self._residual + 0.5 * ops.experts(self._x, routed, self.experts)
        self._out = ops.computed(total)
        self.chosen = ops.chosen[0]
        self._program = ops.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> x with half of the experts' output added"""
        self._x[: len(x)].copy_(x)
        self._residual[: len(x)].copy_(x)
        self._program.run(self._kernels, StepArgs(num_tokens=len(x)))
        return self._out[: len(x)].clone()
