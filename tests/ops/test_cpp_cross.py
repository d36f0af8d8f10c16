"""Attention to vectors of an encoder, by the kernels of every instruction set: against torch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.executor.driver import ints
from weft.config.model import ModelConfig
from weft.executor.cpu.encoded import CppEncoded
from weft.executor.kv_pool import EncodedPool
from weft.executor.plain.encoded import TorchEncoded
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps

pytestmark = pytest.mark.pairs

HEADS = 3
LAYERS = 2
NUM_ROWS = 2
ROWS = ints([1, 0])
LENS = ints([2, 3])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def pool_of(head_dim: int, num_positions: int) -> EncodedPool:
    config: Any = type("Config", (), {})()
    config.num_layers = LAYERS
    config.num_heads = HEADS
    config.head_dim = head_dim
    config.decoder = type("Decoder", (), {})()
    config.decoder.cross = type("Cross", (), {"num_positions": num_positions})()
    return EncodedPool(cast(ModelConfig, config), NUM_ROWS, torch.device("cpu"))


@pytest.mark.parametrize("num_positions", [1, 61, 100])
@pytest.mark.parametrize("head_dim", [12, 18, 64, 72])
def test_tokens_attend_to_what_was_written_for_their_row(
    kernels: Library, head_dim: int, num_positions: int
) -> None:
    pool = pool_of(head_dim, num_positions)
    plain_pool = pool_of(head_dim, num_positions)
    ops = CppOps(kernels, WeightFormat.F32)
    encoded = CppEncoded(pool, ops)
    plain = TorchEncoded(plain_pool)
    for row in (0, 1, 0):  # the first is written over
        vectors = random(num_positions, encoded.width + row)[:, row:]
        encoded.write(row, vectors)
        plain.write(row, vectors.contiguous())
    for found, expected in zip(pool.tensors, plain_pool.tensors, strict=True):
        assert torch.equal(found, expected)
    queries = random(int(LENS.sum()), HEADS * head_dim)
    ops.begin(len(queries))
    x = ops.recorder.buffer(HEADS * head_dim)
    out = encoded.attend(x, 1)
    program = ops.finish()
    x.copy_(queries)
    step = StepArgs(
        num_tokens=len(queries),
        num_requests=len(ROWS),
        rows=ROWS.ctypes.data,
        lens=LENS.ctypes.data,
    )
    program.run(kernels, step)
    plain.prepare(ROWS, LENS)
    torch.testing.assert_close(out, plain.attend(queries, 1), rtol=1e-5, atol=1e-5)
