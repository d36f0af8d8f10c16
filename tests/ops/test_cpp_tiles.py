"""Products whose inputs may be rounded to bfloat16: by the matrix unit, where the processor has
one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.protocol import Norm

ROWS = (32, 33, 100, 300)


@pytest.fixture(scope="module")
def best() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Products:
    """What a program of products makes of rows, with and without rounding."""

    def __init__(self, library: Library, in_size: int, out_size: int, kind: str) -> None:
        self._library = library
        self._kind = kind
        self._in_size = in_size
        self._out_size = out_size
        self._ops = CppOps(library, WeightFormat.BF16)
        sizes = (out_size, out_size) if kind == "gated" else (out_size,)
        self._matrix = self._ops.matrix(in_size, sizes, bias=True, gated=kind == "gated")
        for part in range(len(sizes)):
            weight = random(out_size, in_size, seed=part).bfloat16() / in_size**0.5
            self._matrix.put(part, weight)
            self._matrix.put_bias(part, random(out_size, seed=7 + part))
        self._norm = Norm(random(in_size).abs() + 0.5, 1e-6)

    def __call__(self, x: Tensor, *, may_round: bool) -> Tensor:
        ops = self._ops
        ops.may_round = may_round
        ops.begin(len(x))
        rows = ops.recorder.buffer(self._in_size)
        match self._kind:
            case "gated":
                out = ops.computed(ops.gated(rows, self._matrix))
            case "gelu":
                out = ops.computed(ops.activated(rows, self._matrix, "gelu"))
            case "norm":
                out = ops.computed(ops.linear(ops.norm(rows, self._norm), self._matrix))
            case _:
                total = ops.recorder.buffer(self._out_size)
                total.fill_(0.5)
                out = ops.computed(total + ops.linear(rows, self._matrix))
        program = ops.finish()
        rows.copy_(x)
        program.run(self._library, StepArgs(num_tokens=len(x)))
        return out.clone()


@pytest.mark.parametrize("kind", ["gated", "gelu", "norm", "add"])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (100, 45), (1090, 70)])
def test_products_of_many_rows_are_those_of_rounded_inputs(
    best: Library, kind: str, in_size: int, out_size: int
) -> None:
    products = Products(best, in_size, out_size, kind)
    for num in ROWS:
        x = random(num, in_size, seed=num)
        exact = products(x, may_round=False)
        torch.testing.assert_close(products(x, may_round=True), exact, rtol=0.03, atol=0.03)
        if kind == "norm":
            continue
        # What bfloat16 has already, loses nothing.
        x = x.bfloat16().float()
        exact = products(x, may_round=False)
        torch.testing.assert_close(products(x, may_round=True), exact, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others(best: Library) -> None:
    products = Products(best, 1090, 70, "norm")
    x = random(300, 1090)
    whole = products(x, may_round=True)
    for first, num in ((0, 32), (17, 64), (250, 50)):
        few = products(x[first : first + num], may_round=True)
        assert torch.equal(few, whole[first : first + num])


def test_a_row_that_is_not_finite_harms_no_other(best: Library) -> None:
    products = Products(best, 100, 45, "gelu")
    x = random(40, 100)
    before = products(x, may_round=True)
    x[3, 7] = torch.nan
    after = products(x, may_round=True)
    assert after[3].isnan().all()
    others = [row for row in range(40) if row != 3]
    assert torch.equal(after[others], before[others])
