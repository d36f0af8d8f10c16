"""Experts with random weights, the same for every `Ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.codes import FORMATS, random_codes
from weft.models.layers.linear import INPUTS, OUTPUTS
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.elementwise import gate_and_mul
from weft.ops.protocol import Experts, Matrix, Ops, Router
from weft.ops.quantize import ROW_GROUP, round_rows
from weft.ops.routing import Choice, Routed, Scores


def random(*shape: int, seed: int = 0) -> Tensor:
    return _drawn(shape, seed).clone()


@lru_cache(maxsize=128)  # for each instruction set the same
def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
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


class Twin:
    """The residual stream behind the experts, by plain operations."""

    def __init__(self, ops: Ops, shape: Shape) -> None:
        self._ops = ops
        self.router = shape.router(ops)
        self.experts = shape.experts(ops)

    def __call__(self, x: Tensor) -> Tensor:
        routed = self._ops.route(x, self.router)
        return x.clone() + 0.5 * self._ops.experts(x, routed, self.experts)


def mixed(ops: Ops, shape: Shape, x: Tensor) -> Tensor:
    """What the twin of such experts makes of x."""
    return Twin(ops, shape)(x)


# What kernels compute with the weights that they have packed


class Rounded(NamedTuple):
    """Inputs of a product as kernels round them, and how far theirs may be from these: by a step
    where the exact input is nearly in the middle between two of them."""

    values: Tensor
    doubt: Tensor


NEARLY = 1e-5  # of the largest input: how exact kernels are in float32
PAIRS = ("avx512_bf16", "emulated_bf16")  # round what they multiply with bfloat16


def rounded_for(kernels: Library, format: WeightFormat) -> Callable[[Tensor], Rounded]:
    """How inputs of products are rounded, x [T, in] float32."""
    if format in (WeightFormat.I8, WeightFormat.I4):
        return in_groups
    if format == WeightFormat.BF16 and kernels.instruction_set in PAIRS:
        return in_bfloat16
    return lambda x: Rounded(x, torch.zeros_like(x))


def in_groups(x: Tensor) -> Rounded:
    missing = -x.shape[1] % ROW_GROUP
    groups = F.pad(x, (0, missing)).unflatten(1, (-1, ROW_GROUP))
    step = groups.abs().amax(2, keepdim=True) / 127
    num_steps = torch.where(step > 0, groups / step, 0)
    off_middle = (num_steps - num_steps.floor() - 0.5).abs()
    doubt = torch.where(off_middle < 127 * NEARLY, step, 0)
    return Rounded(round_rows(x), doubt.flatten(1)[:, : x.shape[1]])


def in_bfloat16(x: Tensor) -> Rounded:
    error = NEARLY * x.abs().amax(1, keepdim=True)
    low, high = (each.bfloat16().float() for each in (x - error, x + error))
    return Rounded(x.bfloat16().float(), high - low)


class Specified(NamedTuple):
    """Outputs [T, hidden] float64, and how far those of kernels may be from them by rounding."""

    values: Tensor
    doubt: Tensor


def specified(
    shape: Shape,
    experts: Experts,
    x: Tensor,
    routed: Routed,
    rounded: Callable[[Tensor], Rounded],
) -> Specified:
    """What `experts` of kernels have to compute."""
    gate_up = experts.gate_up
    down = experts.down
    found = Specified(*torch.zeros(2, len(x), down.sizes[0], dtype=torch.float64))
    x = rounded(x).values.double()
    for expert in torch.unique(routed.experts).tolist():
        tokens, ranks = torch.where(routed.experts == expert)
        parts = [2 * expert, 2 * expert + 1]
        both = torch.cat([x[tokens] @ weight_of(gate_up, part) for part in parts], 1)
        if shape.bias:
            both += torch.cat([gate_up.get_bias(part) for part in parts])
        inner = rounded(gate_and_mul(both, experts.activation).float())
        weight = weight_of(down, expert)
        each = inner.values.double() @ weight
        if shape.bias:
            each += down.get_bias(expert)
        doubt = inner.doubt.double() @ weight.abs()
        share = routed.weights[tokens, ranks, None].double()
        found.values.index_add_(0, tokens, share * each)
        found.doubt.index_add_(0, tokens, share.abs() * doubt)
    return found


def weight_of(matrix: Matrix, part: int) -> Tensor:
    """As it is packed: [in, out] float64."""
    return matrix.get(part).double().T


class Program:
    """The same, recorded by the kernels."""

    def __init__(self, kernels: Library, ops: CppOps, shape: Shape, capacity: int) -> None:
        self.kernels = kernels
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
        self._program.run(self.kernels, StepArgs(num_tokens=len(x)))
        return self._out[: len(x)].clone()


class Lonely:
    """The `Collective` of a rank whose terms nobody adds to others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> None:
        pass

    def gather(self, x: Tensor) -> Tensor | None:
        raise AssertionError("experts gather nothing")
