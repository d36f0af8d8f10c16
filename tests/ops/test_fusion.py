"""Norms and sums that models write apart become part of the products beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program
from weft.ops.cpp.timing import name_of
from weft.ops.plain import PlainOps
from weft.ops.protocol import Matrix, Norm, Ops

SIZE = 32
NUM_TOKENS = 5
Block = Callable[[Ops, Tensor, Norm, Matrix], Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def matrix(ops: Ops) -> Matrix:
    made = ops.matrix(SIZE, (SIZE,))
    made.put(0, random(SIZE, SIZE) / SIZE**0.5)
    return made


def recorded(library: Library, block: Block) -> tuple[list[str], Tensor]:
    """The operations of a block's program, and its output for random tokens."""
    ops = CppOps(library, WeightFormat.F32)
    weight = matrix(ops)
    norm = Norm(random(SIZE), 1e-6)
    ops.begin(NUM_TOKENS)
    x = ops.recorder.buffer(SIZE)
    out = ops.computed(block(ops, x, norm, weight))
    program = ops.finish()
    x.copy_(random(NUM_TOKENS, SIZE))
    program.run(library, StepArgs(num_tokens=NUM_TOKENS))
    return names(program), out.clone()


def expected(block: Block) -> Tensor:
    ops = PlainOps(torch.float32, torch.device("cpu"))
    return block(ops, random(NUM_TOKENS, SIZE), Norm(random(SIZE), 1e-6), matrix(ops))


def names(program: Program) -> list[str]:
    return [name_of(op).removeprefix("weft::") for op in program._ops]


def pre_norm(ops: Ops, x: Tensor, norm: Norm, weight: Matrix) -> Tensor:
    return x + ops.linear(ops.linear(ops.norm(x, norm), weight), weight)


def normed(ops: Ops, x: Tensor, norm: Norm, weight: Matrix) -> Tensor:
    return ops.norm(x, norm)


def two_readers(ops: Ops, x: Tensor, norm: Norm, weight: Matrix) -> Tensor:
    """Both products of one norm are read, before and behind the sum."""
    h = ops.norm(x, norm)
    first = ops.computed(ops.linear(h, weight))
    return first + ops.linear(ops.linear(h, weight), weight)


@pytest.mark.parametrize(
    ("block", "operations"),
    [
        (pre_norm, ["linear norm 32x32 store", "linear 32x32 add"]),
        (normed, ["norm"]),
        (
            two_readers,
            ["linear norm 32x32 store", "linear norm 32x32 store", "linear 32x32 add"],
        ),
    ],
)
def test_a_block_is_recorded_as_the_fewest_operations_and_computes_what_torch_does(
    library: Callable[[str], Library], block: Block, operations: list[str]
) -> None:
    found, out = recorded(library(""), block)
    assert found == operations
    torch.testing.assert_close(out, expected(block), rtol=1e-4, atol=1e-4)


def test_an_activation_that_a_sum_has_overwritten_cannot_be_read(
    library: Callable[[str], Library],
) -> None:
    def wrong(ops: Ops, x: Tensor, norm: Norm, weight: Matrix) -> Tensor:
        x = x + ops.linear(x, weight)
        h = ops.norm(x, norm)
        y = x + ops.linear(h, weight)
        return y + ops.linear(h, weight)

    with pytest.raises(AssertionError, match="overwritten by a sum"):
        recorded(library(""), wrong)
