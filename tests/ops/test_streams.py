"""The CPU kernels of streams, of cut gates and of limits against torch, with sizes that fill no
whole number of lanes, and with what is not a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.encoder import PlainEncoderOps
from weft.ops.protocol import Norm

ROWS = 7
NUM = 3
SIZE = 37


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def computed(
    library: Library, part: Callable[..., Tensor], *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """part(ops, *inputs) by torch, and by a recorded program."""
    plain = PlainEncoderOps(torch.float32, torch.device("cpu"))
    wanted = part(plain, *(one.clone() for one in inputs)).clone()
    ops = CppEncoderOps(library, WeightFormat.F32)
    ops.begin(ROWS)
    buffers = [ops.recorder.buffer(one.shape[1]) for one in inputs]
    out = part(ops, *buffers)
    program = ops.finish()
    for buffer, one in zip(buffers, inputs, strict=True):
        buffer.copy_(one)
    program.run(library, StepArgs(num_tokens=ROWS))
    return out.clone(), wanted


def assert_same(found: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_streams_open_and_close(library: Library) -> None:
    x = random(1, ROWS, SIZE)
    others = random(2, ROWS, (NUM - 1) * SIZE)
    others[2] = 0
    x[3] = 0
    x[4, 5] = torch.nan
    assert_same(computed(library, lambda ops, x, y: ops.streams.open(x, y), x, others))
    assert_same(computed(library, lambda ops, x, y: ops.streams.close(x, y), x, others))


def test_streams_are_predicted_and_corrected(library: Library) -> None:
    x = random(1, ROWS, NUM * SIZE)
    factors = random(2, ROWS, NUM * NUM)
    assert_same(computed(library, lambda ops, x, by: ops.streams.predict(x, by), x, factors))
    y = random(3, ROWS, SIZE)
    norm = Norm(random(4, SIZE), 1e-6)

    def corrected(ops: PlainEncoderOps, x: Tensor, y: Tensor, by: Tensor) -> Tensor:
        ops.streams.correct(x, y, by, 1)
        ops.streams.add_normed(x, y, norm)
        return x

    assert_same(computed(library, corrected, x, y, random(5, ROWS, NUM)))


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu"])
def test_gates_are_cut_off(library: Library, activation: str) -> None:
    x = 3 + random(1, ROWS, SIZE)
    x[2] = 1.5  # no deviation
    x[4, 5] = torch.nan
    found, wanted = computed(library, lambda ops, x: ops.streams.cut_off(x, 0.7, activation), x)
    assert (wanted[:2] == 0).float().mean() > 0.5
    assert_same((found, wanted))


@pytest.mark.parametrize("activation", ["", "gelu_pytorch_tanh"])
def test_numbers_are_limited(library: Library, activation: str) -> None:
    x = 3 * random(1, ROWS, SIZE)
    x[4, 5] = torch.nan
    limits = torch.tensor([-0.5, 1.25])

    def limited(ops: PlainEncoderOps, x: Tensor) -> Tensor:
        out = ops.space(x, SIZE)
        ops.limit(x, limits, out, activation)
        return out

    assert_same(computed(library, limited, x))
