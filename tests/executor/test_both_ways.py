"""Tokens of a picture see each other both ways: the backends of torch and of the CPU kernels
against a mask written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import MODEL, ints
from weft.arrays import IntArray
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBackend, AttentionBatch
from weft.executor.cpu.attention import CppPaged
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.models.layers.attention import Heads
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.ops import CppOps

CPU = torch.device("cpu")
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
CONTEXT = 768
# Pictures of each row: first position and position behind the last.
PICTURES = {0: ((3, 11), (240, 420)), 1: ((100, 104),), 2: ()}
LENGTHS = {0: 700, 1: 120, 2: 50}


class Piece(NamedTuple):
    row: int
    start: int
    num: int


WHOLE = [[Piece(0, 0, 700), Piece(1, 0, 120), Piece(2, 0, 50)]]
# Chunks end before and behind pictures, never inside.
CHUNKS = [
    [Piece(0, 0, 200), Piece(2, 0, 1)],
    [Piece(1, 0, 100), Piece(2, 1, 1), Piece(0, 200, 300)],
    [Piece(1, 100, 4), Piece(2, 2, 48)],
    [Piece(0, 500, 200), Piece(1, 104, 16)],
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
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        decoder=DecoderSpec(layers=(layer,)),
    )


class Recorded:
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
        self._ops.begin(len(qkv))
        buffer = self._ops.recorder.buffer(qkv.shape[1])
        out = self._paged.forward(buffer, heads, layer)
        program = self._ops.finish()
        buffer.copy_(qkv)
        self._paged.step.num_tokens = len(qkv)
        program.run(self._library, self._paged.step)
        return out.clone()


def ends_of(row: int) -> IntArray:
    """[length] what each token of a row sees up to."""
    ends = np.arange(1, LENGTHS[row] + 1, dtype=np.int32)
    for first, last in PICTURES[row]:
        ends[first:last] = last
    return ends


def qkv_of(row: int) -> Tensor:
    return random(row, LENGTHS[row], (HEADS + 2 * KV_HEADS) * HEAD_DIM)


def run(
    config: ModelConfig, heads: Heads, backend: AttentionBackend, steps: list[list[Piece]]
) -> dict[int, Tensor]:
    """The outputs of each row, one behind the other."""
    order = torch.randperm(3 * CONTEXT, generator=torch.Generator().manual_seed(0))
    table = order.view(3, CONTEXT).int()
    found: dict[int, list[Tensor]] = {row: [] for row in LENGTHS}
    for step in steps:
        rows, starts, lens = (ints(column) for column in zip(*step, strict=True))
        spans = [slice(piece.start, piece.start + piece.num) for piece in step]
        pieces = list(zip(step, spans, strict=True))
        sees_to = np.concatenate([ends_of(piece.row)[span] for piece, span in pieces])
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        has_picture = bool((sees_to > positions + 1).any())
        backend.prepare(
            AttentionBatch(
                rows,
                starts,
                lens,
                torch.from_numpy(positions),
                torch.cat([table[piece.row, span] for piece, span in pieces]).long(),
                table,
                sees_to=sees_to if has_picture else None,
            )
        )
        qkv = torch.cat([qkv_of(piece.row)[span] for piece, span in pieces])
        for piece, out in zip(
            step, backend.forward(qkv, heads, 0).split(lens.tolist()), strict=True
        ):
            found[piece.row].append(out)
    return {row: torch.cat(pieces) for row, pieces in found.items() if pieces}


def expected(row: int, window: int, cap: float, *, looks_back: bool = False) -> Tensor:
    """By the whole mask."""
    num = LENGTHS[row]
    q, k, v = qkv_of(row).view(num, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for one in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / HEAD_DIM**0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    places = torch.arange(num)
    ends = places + 1 if looks_back else torch.from_numpy(ends_of(row))
    hidden = places >= ends[:, None]
    if window:
        hidden |= places[:, None] - places >= window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


HEADS_OF = Heads(rope=None, q_norm=None, k_norm=None)


@pytest.mark.parametrize("steps", [WHOLE, CHUNKS])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (200, 0.0), (30, 0.0), (0, 3.0)])
def test_both_backends_follow_the_mask(
    library: Library, steps: list[list[Piece]], window: int, cap: float
) -> None:
    config = config_of(window=window)
    heads = HEADS_OF._replace(cap=cap)

    def pool() -> KVPool:
        return KVPool(config, 3 * CONTEXT, CPU, torch.float32)

    by_torch = run(config, heads, TorchPaged(config, pool()), steps)
    by_kernels = run(config, heads, Recorded(config, library, pool()), steps)
    for row in LENGTHS:
        wanted = expected(row, window, cap)
        torch.testing.assert_close(by_torch[row], wanted, rtol=0, atol=2e-5)
        torch.testing.assert_close(by_kernels[row], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_chunks_change_no_bit(library: Library, dtype: torch.dtype) -> None:
    config = config_of(window=200)
    config = replace(config, kv_dtype=str(dtype).removeprefix("torch."))

    def outputs(steps: list[list[Piece]]) -> dict[int, Tensor]:
        pool = KVPool(config, 3 * CONTEXT, CPU, dtype)
        return run(config, HEADS_OF, Recorded(config, library, pool), steps)

    whole = outputs(WHOLE)
    in_chunks = outputs(CHUNKS)
    for row in LENGTHS:
        assert torch.equal(whole[row], in_chunks[row])


def test_a_step_after_one_with_pictures_sees_none_behind(library: Library) -> None:
    config = config_of()
    pool = KVPool(config, 3 * CONTEXT, CPU, torch.float32)
    steps = [[Piece(1, 0, 104)], [Piece(1, 104, 16)]]
    for backend in (Recorded(config, library, pool), TorchPaged(config, pool)):
        found = run(config, HEADS_OF, backend, [*steps, [Piece(2, 0, 50)]])
        torch.testing.assert_close(found[2], expected(2, 0, 0.0), rtol=0, atol=2e-5)


def test_layers_may_look_back_alone(library: Library) -> None:
    config = config_of()
    heads = HEADS_OF._replace(sees_later=False)
    pool = KVPool(config, 3 * CONTEXT, CPU, torch.float32)
    for backend in (Recorded(config, library, pool), TorchPaged(config, pool)):
        found = run(config, heads, backend, CHUNKS)
        for row in LENGTHS:
            wanted = expected(row, 0, 0.0, looks_back=True)
            torch.testing.assert_close(found[row], wanted, rtol=0, atol=2e-5)
