"""Adapters by the kernels, beside `TorchAdapters`; and whole steps with graphs on the fake GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.executor.gpu.staging import offsets, split
from weft.ops.lora import LoraPart, TorchAdapters, row_blocks
from weft.ops.plain import PlainOps
from weft.ops.triton.lora import TritonAdapters
from weft.ops.triton.ops import TritonOps

CPU = torch.device("cpu")
IN = 70
SIZES = (70, 20)
VOCAB = 37
PLACES = 3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def send(arrays: Sequence[np.ndarray], target: Tensor | None = None) -> Tensor:
    begins, total = offsets([len(array) for array in arrays])
    if target is None:
        target = torch.zeros(total, dtype=torch.int32)
    for begin, array in zip(begins, arrays, strict=True):
        target[begin : begin + len(array)] = torch.from_numpy(array)
    return target


class Pair:
    """The kernels and their specification, with the same weights and adapters."""

    def __init__(self, graph_tokens: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.ours, self.theirs = TritonOps(dtype, CPU), PlainOps(dtype, CPU)
        self.adapters = TritonAdapters(dtype, CPU, PLACES, send, split, graph_tokens=graph_tokens)
        self.ours.adapters, self.theirs.adapters = self.adapters, TorchAdapters(dtype, CPU)
        self.matrices = []
        self.tables = []
        for ops in (self.ours, self.theirs):
            matrix = ops.matrix(IN, SIZES)
            table = ops.matrix(IN, (VOCAB,), precise=True)
            for part, size in enumerate(SIZES):
                matrix.put(part, random(size, IN, seed=part) / 10)
            table.put(0, random(VOCAB, IN, seed=9))
            self.matrices.append(matrix)
            self.tables.append(table)
        ranks = dict.fromkeys(self.matrices[:1] + self.tables[:1], 20)
        self.adapters.watch(ranks, dict.fromkeys(self.tables[:1], 20))
        for place in range(PLACES):
            self.put(place, seed=place)

    def put(self, place: int, seed: int) -> None:
        parts: list[LoraPart | None] = []
        for index, size in enumerate(SIZES):
            rank = (4, 20)[(index + seed) % 2]
            a = random(rank, IN, seed=10 * seed + index) / 10
            b = random(size, rank, seed=50 + 10 * seed + index) / 4
            parts.append(LoraPart(a, b, 0.7 + seed))
        if seed == 1:
            parts[-1] = None
        head = LoraPart(random(8, IN, seed=70 + seed) / 10, random(VOCAB, 8, seed=seed), 0.5)
        row = LoraPart(random(5, VOCAB, seed=80 + seed), random(IN, 5, seed=90 + seed), 0.3)
        for index, ops in enumerate((self.ours, self.theirs)):
            assert ops.adapters is not None
            matrix = self.matrices[index]
            table = self.tables[index]
            ops.adapters.prepare({matrix: parts, table: [head]}, {table: row})(place)

    def begin(self, adapters: list[int] | None) -> None:
        told = None if adapters is None else np.array(adapters, np.int32)
        for ops in (self.ours, self.theirs):
            assert ops.adapters is not None
            ops.adapters.begin(told)

    def products(self, x: Tensor, ids: Tensor, places: Tensor) -> list[tuple[Tensor, Tensor]]:
        found = []
        for index, ops in enumerate((self.ours, self.theirs)):
            matrix = self.matrices[index]
            table = self.tables[index]
            before = torch.ones(len(x), sum(SIZES), dtype=x.dtype)
            found.append(
                [
                    ops.computed(before.clone() + ops.linear(x, matrix)),
                    ops.computed(before.clone() + 1.5 * ops.linear(x, matrix)),
                    ops.computed(ops.embed(ids, table, None, 2.0)),
                    ops.logits(x.index_select(0, places), table, places=places),
                ]
            )
        return list(zip(*found, strict=True))


def in_turns(num: int) -> list[int]:
    return [(0, 0, 1, -1, 2, 1, -1, 0)[row % 8] for row in range(num)]


@pytest.mark.parametrize(("num", "graph_tokens"), [(3, 40), (19, 0)])
def test_kernels_add_what_the_specification_adds(num: int, graph_tokens: int) -> None:
    pair = Pair(graph_tokens)
    x = random(num, IN, seed=5)
    ids = torch.arange(num) * 5 % VOCAB
    places = torch.arange(0, num, 9)
    for adapters in (in_turns(num), None):
        pair.begin(adapters)
        for ours, theirs in pair.products(x, ids, places):
            torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)


def test_a_place_that_is_filled_anew_or_cleared_has_nothing_of_before() -> None:
    pair = Pair()
    x = random(6, IN, seed=5)
    pair.begin([2] * 6)
    pair.put(2, seed=4)
    [(ours, theirs), *_] = pair.products(x, torch.arange(6), torch.arange(6))
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)
    for ops in (pair.ours, pair.theirs):
        assert ops.adapters is not None
        ops.adapters.prepare({})(2)
    [(ours, theirs), *_] = pair.products(x, torch.arange(6), torch.arange(6))
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)


def test_a_grid_has_room_for_the_chunks_of_every_step() -> None:
    adapters = TritonAdapters(torch.float32, CPU, PLACES, send, split)
    rng = np.random.default_rng(1)
    for num in range(1, 60):
        for kinds in (1, 2, 3):
            chosen = rng.integers(-1, kinds, num).astype(np.int32)
            blocks, _ = row_blocks(chosen, 16)
            assert len(blocks) <= adapters._num_chunks(num)
