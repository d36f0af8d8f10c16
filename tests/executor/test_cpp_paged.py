"""The attention backend of the CPU kernels against that of torch: the same queries, keys and values
through both, in several steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import MODEL, ints
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, RopeConfig
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBackend, AttentionBatch
from weft.executor.cpu.attention import CppPaged
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.ops.protocol import Norm

CPU = torch.device("cpu")
SLOTS = 400
ROWS = 6
CONTEXT = 128
MOST_TOKENS = 64
STEPS = [  # requests: row, tokens in the cache, tokens to run
    [(0, 0, 30), (2, 0, 1)],
    [(0, 30, 1), (2, 1, 5), (1, 0, 45)],
    [(1, 45, 1), (0, 31, 1), (2, 6, 1)],
]


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def config_of(**mechanisms: Any) -> ModelConfig:
    layer = LayerSpec(attention=AttentionSpec(**mechanisms))
    return replace(
        MODEL,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        decoder=DecoderSpec(layers=(layer,)),
    )


class CppTwin:
    """The backend of the kernels, which records, as one that computes."""

    def __init__(self, config: ModelConfig, library: Library, pool: KVPool) -> None:
        self._library = library
        self._ops = CppOps(library, WeightFormat.F32)
        self._paged = CppPaged(config, pool, self._ops, CONTEXT)

    def prepare(self, batch: AttentionBatch) -> None:
        self._paged.prepare(batch)

    def narrow(self, x: Tensor) -> Tensor:
        return x

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        self._ops.begin(MOST_TOKENS)
        buffer = self._ops.recorder.buffer(qkv.shape[1])
        out = self._paged.forward(buffer, heads, layer)
        program = self._ops.finish()
        buffer[: len(qkv)] = qkv
        self._paged.step.num_tokens = len(qkv)
        program.run(self._library, self._paged.step)
        return out[: len(qkv)].clone()


def run(config: ModelConfig, heads: Heads, backend: AttentionBackend) -> list[Tensor]:
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))
    table = table[: ROWS * 60].view(ROWS, 60).int()
    num_heads = (2 if heads.is_gated else 1) * config.num_heads + 2 * config.num_kv_heads
    row_size = num_heads * config.head_dim
    found = []
    for seed, step in enumerate(STEPS):
        rows, starts, lens = (ints(column) for column in zip(*step, strict=True))
        positions = np.concatenate([np.arange(start, start + num) for _, start, num in step])
        slots = torch.cat([table[row, start : start + num] for row, start, num in step]).long()
        backend.prepare(
            AttentionBatch(rows, starts, lens, torch.from_numpy(positions), slots, table)
        )
        found.append(backend.forward(random(seed, len(slots), row_size), heads, 0))
    return found


@pytest.mark.parametrize(
    ("has_sinks", "is_gated"),
    [(False, False), (True, False), (False, True), (True, True)],
)
@pytest.mark.parametrize("window", [0, 7])
def test_the_kernels_compute_what_torch_does(
    library: Library, has_sinks: bool, is_gated: bool, window: int
) -> None:
    config = config_of(window=window)
    norm = Norm(1 + 0.3 * random(8, config.head_dim), config.norm_eps)
    sinks = 2 * random(9, config.num_heads) if has_sinks else None
    heads = Heads(Rope(RopeConfig(), config), norm, norm, scale=0.4, sinks=sinks, is_gated=is_gated)
    pools = [KVPool(config, SLOTS, CPU, torch.float32) for _ in "ab"]
    ours = run(config, heads, CppTwin(config, library, pools[0]))
    twin = run(config, heads, TorchPaged(config, pools[1]))
    for got, want in zip(ours, twin, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
