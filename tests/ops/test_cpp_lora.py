from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.codes import FORMATS as CODE_FORMATS
from tests.ops.codes import PACKED, random_codes
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.lora import CppAdapters
from weft.ops.cpp.matrices import PackedMatrix
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import ProgramRecorder
from weft.ops.fusion import Source
from weft.ops.lora import LoraPart, row_blocks
from weft.ops.protocol import Norm

pytestmark = pytest.mark.pairs

IN_SIZE = 100
SIZES = (70, 20, 41)  # parts that begin and end in the midst of panels
FORMATS = (*PACKED, "q4_k", "q6_k", "nvfp4", "int8 by output")
NUM_ADAPTERS = 3
MAX_RANK = 96


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(sizes: Sequence[int], seed: int) -> list[LoraPart | None]:
    """Of another rank for each part; the last part of one adapter is left alone."""
    parts: list[LoraPart | None] = []
    for index, size in enumerate(sizes):
        rank = (4, 16, 90)[(index + seed) % 3]
        a = random(rank, IN_SIZE, seed=10 * seed + index) / IN_SIZE**0.5
        parts.append(LoraPart(a, random(size, rank, seed=99 + 10 * seed + index) / 4, 0.7 + seed))
    if seed == 1:
        parts[-1] = None
    return parts


class Product:
    """A recorded product with adapters, run on rows of any number up to its capacity."""

    def __init__(
        self,
        library: Library,
        format: WeightFormat | str,
        *,
        gated: bool = False,
        epilogue: Epilogue = Epilogue.STORE,
        normed: bool = False,
        capacity: int = 64,
    ) -> None:
        sizes = (70, 70) if gated else SIZES
        kept = WeightFormat.BF16 if isinstance(format, str) else format
        self.ops = CppOps(library, kept, keeps_codes=True)
        self.library = library
        self.matrix = self.ops.matrix(IN_SIZE, sizes, gated=gated)
        assert isinstance(self.matrix, PackedMatrix)
        if isinstance(format, str):
            for part in range(len(sizes)):
                self.matrix.keep_as(part, CODE_FORMATS[format])
        for part, size in enumerate(sizes):
            if isinstance(format, str):
                codes = random_codes(CODE_FORMATS[format], size, IN_SIZE, seed=part)
                self.matrix.put_codes(part, codes)
            else:
                self.matrix.put(part, random(size, IN_SIZE, seed=part) / IN_SIZE**0.5)
        self.norm = None
        if normed:
            self.norm = Norm(1 + 0.1 * random(IN_SIZE, seed=50), 1e-6)
        dtype = torch.float32 if format == WeightFormat.F32 else torch.bfloat16
        self.adapters = CppAdapters(NUM_ADAPTERS, MAX_RANK, dtype)
        self.adapters.watch({self.matrix: MAX_RANK})
        self.ops.adapters = self.adapters
        self.loaded = [adapter(sizes, seed) for seed in range(NUM_ADAPTERS)]
        for place, parts in enumerate(self.loaded):
            self.adapters.prepare({self.matrix: parts})(place)
        recorder = ProgramRecorder(capacity)
        self.ops._recorder = recorder
        self.x = recorder.buffer(IN_SIZE)
        self.y = recorder.buffer(sizes[0] if gated else sum(sizes))
        self.ops.record_linear(Source(self.x, self.norm), self.matrix, self.y, epilogue, 1.5)
        self.program = self.ops.finish()
        self.step = abi.StepArgs()
        self.adapters.of_steps(self.step)

    def run(self, x: Tensor, adapters: list[int] | None, *, before: float = 0.0) -> Tensor:
        self.x[: len(x)] = x
        self.y[: len(x)] = before
        self.step.num_tokens = len(x)
        self.adapters.begin(None if adapters is None else np.array(adapters, np.int32))
        self.program.run(self.library, self.step)
        return self.y[: len(x)].clone()

    def added(self, x: Tensor, adapters: list[int]) -> Tensor:
        """What adapters add to the product itself, in float64."""
        x = x.double()
        if self.norm is not None:
            mean = x.square().mean(1, keepdim=True) + self.norm.eps
            x = x * mean.rsqrt() * self.norm.weight.double()
        found = torch.zeros(len(x), sum(self.matrix.sizes), dtype=torch.float64)
        for row, place in enumerate(adapters):
            column = 0
            parts = self.loaded[place] if place >= 0 else ()
            for part, size in zip(parts, self.matrix.sizes, strict=False):
                if part is not None:
                    a, b = (each.to(self.adapters.dtype).double() for each in part[:2])
                    found[row, column : column + size] = part.scale * b @ (a @ x[row])
                column += size
        return found


def in_turns(num: int) -> list[int]:
    """Neighbours with the same adapter, with others and with none."""
    return [(0, 0, 1, -1, 2, 1, -1, 0)[row % 8] for row in range(num)]


@pytest.mark.parametrize("num_rows", [1, 3, 8, 45])
@pytest.mark.parametrize("format", FORMATS)
def test_adapters_add_their_products(kernels: Library, format, num_rows: int) -> None:
    product = Product(kernels, format, normed=num_rows % 2 == 0)
    x = random(num_rows, IN_SIZE, seed=7)
    adapters = in_turns(num_rows)
    expected = product.run(x, None) + product.added(x, adapters).float()
    torch.testing.assert_close(product.run(x, adapters), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.ADD_SCALED, Epilogue.GELU_TANH])
def test_every_epilogue_has_them(kernels: Library, epilogue: Epilogue) -> None:
    product = Product(kernels, WeightFormat.F32, epilogue=epilogue)
    plain = Product(kernels, WeightFormat.F32)
    x = random(9, IN_SIZE, seed=8)
    found = product.run(x, in_turns(9), before=2.0)
    y = plain.run(x, None) + product.added(x, in_turns(9)).float()
    if epilogue == Epilogue.GELU_TANH:
        expected = torch.nn.functional.gelu(y, approximate="tanh")
    else:
        expected = 2 + (y if epilogue == Epilogue.ADD else 1.5 * y)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.BF16, WeightFormat.I4])
def test_a_gate_and_its_up_have_adapters_each(kernels: Library, format: WeightFormat) -> None:
    product = Product(kernels, format, gated=True, epilogue=Epilogue.GATED_SILU)
    x = random(30, IN_SIZE, seed=9)
    adapters = in_turns(30)
    found = product.run(x, adapters)
    weights = torch.cat([product.matrix.get(part) for part in range(2)])
    if format == WeightFormat.I4:
        assert not torch.equal(found, product.run(x, None))
        return
    both = x.to(weights.dtype) @ weights.T + product.added(x, adapters).float()
    gate, up = both.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    atol = 2e-5 if format == WeightFormat.F32 else 0.03
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_gets_the_same_bits_beside_any_others(kernels: Library, format) -> None:
    product = Product(kernels, format, normed=True)
    x = random(40, IN_SIZE, seed=11)
    adapters = in_turns(40)
    together = product.run(x, adapters)
    for row in range(8):
        alone = product.run(x[row : row + 1], [adapters[row]])
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    shuffled = product.run(x[order], [adapters[row] for row in order.tolist()])
    assert torch.equal(shuffled, together[order])
    without = product.run(x, None)
    has_none = torch.tensor(adapters) < 0
    assert torch.equal(without[has_none], together[has_none])


def test_a_cleared_place_adds_nothing(kernels: Library) -> None:
    product = Product(kernels, WeightFormat.BF16)
    x = random(5, IN_SIZE, seed=12)
    product.adapters.clear(0)
    assert torch.equal(product.run(x, [0] * 5), product.run(x, None))


def test_blocks_hold_the_tokens_of_one_adapter_each() -> None:
    for num, kinds in itertools.product((1, 5, 13, 50), (1, 2, 5)):
        adapters = np.random.default_rng(num).integers(-1, kinds, num).astype(np.int32)
        blocks, rows = row_blocks(adapters, abi.LORA_ROWS)
        assert sorted(rows.tolist()) == np.flatnonzero(adapters >= 0).tolist()
        seen = []
        for place, first, count in blocks.tolist():
            assert 1 <= count <= abi.LORA_ROWS
            assert set(adapters[rows[first : first + count]].tolist()) == {place}
            seen += range(first, first + count)
        assert seen == list(range(len(rows)))
