"""Attention of encoders by the matrix unit, where the processor has it, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.encoder_attention import TorchBidirectional
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (2, 72), (3, 16), (1, 128)])
@pytest.mark.parametrize("lens", [[1], [33], [5, 64, 40], [300, 31]])
def test_rounded_attention_stays_within_stretches(
    library: Library, heads: int, head_dim: int, lens: list[int]
) -> None:
    backend = CppTowerBackend(library, WeightFormat.BF16)
    attention = backend.make_attention(heads, head_dim)
    qkv = random(sum(lens), 3 * heads * head_dim)
    attention.prepare(lens)
    found = backend.run(attention.forward, qkv).clone()
    twin = TorchBidirectional(heads)
    twin.prepare(np.array(lens), CPU)
    # Queries, keys and weights may be rounded, each by at most 1 / 256 of itself.
    torch.testing.assert_close(found, twin.forward(qkv), rtol=0, atol=0.03)
    assert torch.equal(backend.run(attention.forward, qkv), found)
    # What a stretch gets does not depend on the others.
    attention.prepare(lens[:1])
    assert torch.equal(backend.run(attention.forward, qkv[: lens[0]]), found[: lens[0]])


def test_float32_is_never_rounded(library: Library) -> None:
    backend = CppTowerBackend(library, WeightFormat.F32)
    attention = backend.make_attention(2, 64)
    qkv = random(100, 3 * 2 * 64)
    attention.prepare([100])
    twin = TorchBidirectional(2)
    twin.prepare(np.array([100]), CPU)
    found = backend.run(attention.forward, qkv)
    torch.testing.assert_close(found, twin.forward(qkv), rtol=0, atol=1e-5)
