"""What only some families of models need, by the kernels of every instruction set: each against
`PlainOps`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.plain import PlainOps
from weft.ops.protocol import LayerNorm, Matrix, Norm, Ops

pytestmark = pytest.mark.pairs

Compute = Callable[[Ops, Tensor], Tensor]
NUM_TOKENS = 7
TOKENS = torch.tensor([3, 0, 39, 3, 17, 8, 21])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight_of(
    ops: Ops,
    in_size: int,
    sizes: tuple[int, ...],
    *,
    gated: bool = False,
) -> Matrix:
    weight = ops.matrix(in_size, sizes, bias=True, gated=gated)
    for part, size in enumerate(sizes):
        weight.put(part, random(size + part, in_size)[part:] / in_size**0.5)
        weight.put_bias(part, random(size))
    return weight


@cache  # a program points to it
def norm_of(size: int) -> Norm:
    return Norm(1 + 0.2 * random(size), 1e-6)


@cache
def layer_norm_of(size: int) -> LayerNorm:
    return LayerNorm(1 + 0.2 * random(size), random(size), 1e-5)


def scaled_sum(ops: Ops, x: Tensor) -> Tensor:
    """The residual stream of Granite."""
    size = x.shape[1]
    y = ops.computed(ops.linear(x, weight_of(ops, size, (size,))))
    return y + 0.37 * ops.linear(x, weight_of(ops, size, (size,)))


def normed_sum(ops: Ops, x: Tensor) -> Tensor:
    """That of OLMo 2."""
    size = x.shape[1]
    y = ops.computed(ops.linear(x, weight_of(ops, size, (size,))))
    return y + ops.norm(ops.linear(x, weight_of(ops, size, (size,))), norm_of(size))


def norm_of_columns(ops: Ops, x: Tensor) -> Tensor:
    size = x.shape[1]
    y = ops.computed(ops.linear(x, weight_of(ops, size, (3 * size,))))
    ops.norm_overwrites(y[:, size : 2 * size], norm_of(size))
    return y


def norm_with_mean(ops: Ops, x: Tensor) -> Tensor:
    return ops.layer_norm(x, layer_norm_of(x.shape[1]))


def gate_by_exact_gelu(ops: Ops, x: Tensor) -> Tensor:
    return ops.gated(x, weight_of(ops, x.shape[1], (45, 45), gated=True), "gelu")


def gate_by_gelu(ops: Ops, x: Tensor) -> Tensor:
    weight = weight_of(ops, x.shape[1], (45, 45), gated=True)
    return ops.gated(x, weight, "gelu_pytorch_tanh")


def squared_relu(ops: Ops, x: Tensor) -> Tensor:
    return ops.activated(x, weight_of(ops, x.shape[1], (45,)), "relu2")


def logits_scaled(ops: Ops, x: Tensor) -> Tensor:
    return ops.logits(x, weight_of(ops, x.shape[1], (200,)), scale=0.25)


def logits_scaled_and_capped(ops: Ops, x: Tensor) -> Tensor:
    return ops.logits(x, weight_of(ops, x.shape[1], (200,)), scale=4.0, cap=3.0)


def scaled_embedding(ops: Ops, x: Tensor) -> Tensor:
    table = ops.matrix(x.shape[1], (40,), precise=True)
    table.put(0, random(40, x.shape[1]))
    return ops.embed(TOKENS, table, scale=5.5)


MECHANISMS: tuple[Compute, ...] = (
    scaled_sum,
    normed_sum,
    norm_of_columns,
    norm_with_mean,
    gate_by_gelu,
    gate_by_exact_gelu,
    squared_relu,
    logits_scaled,
    logits_scaled_and_capped,
    scaled_embedding,
)


@pytest.mark.parametrize("compute", MECHANISMS)
@pytest.mark.parametrize("size", [17, 64, 200])
def test_a_mechanism_is_the_plain_twin(kernels: Library, compute: Compute, size: int) -> None:
    ops = CppOps(kernels, WeightFormat.F32)
    ops.begin(NUM_TOKENS)
    x = ops.recorder.buffer(size)
    out = ops.computed(compute(ops, x))
    program = ops.finish()
    x.copy_(random(NUM_TOKENS, size))
    program.run(kernels, StepArgs(num_tokens=NUM_TOKENS, tokens=TOKENS.data_ptr()))
    plain = PlainOps(torch.float32, torch.device("cpu"))
    expected = compute(plain, random(NUM_TOKENS, size))
    torch.testing.assert_close(out[:NUM_TOKENS], expected, rtol=1e-4, atol=2e-5)
