"""Adapters (LoRA) on a GPU: two launches add the terms of all adapters of a step to a product.

    tokens   | a a b - c a |        the adapters of the tokens of a plan
    order    | 0 1 5 2 4   |        the tokens, sorted by adapter
    chunks   | 0 1 5 | 2 | 4 |      at most CHUNK tokens of one adapter

    shrink   inner[t] = A[slot] x[t]           for each chunk and block of ranks, of all parts
    expand   y[t] += B[slot] inner[t]          for each chunk and block of outputs; B has the scale

A and B of all slots are at fixed addresses, padded with zeros to the highest rank, and so are the
chunks of a step: a graph that was captured with adapters is valid for any adapters. A grid has the
maximum number of chunks for the step's number of tokens; the programs of absent chunks end at once.
The result of a token depends only on its own row, not on the other tokens of its chunk.
`ops/lora.py` is the specification. None of this has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.lora import (
    NO_RANKS,
    NO_TABLES,
    LoraPart,
    LoraParts,
    LoraTables,
    PutAdapter,
    Ranks,
    row_blocks,
)
from weft.ops.protocol import Matrix
from weft.ops.triton.launches import LORA

RANK_STEP = 16
Send = Callable[[Sequence[IntArray], Tensor | None], Tensor]
Split = Callable[[Tensor, Sequence[int]], list[Tensor]]


class Chunks(NamedTuple):
    """The tokens of a step by adapter, on the device. All int32."""

    adapters: Tensor  # [T or more] the slot of each token's adapter, or -1
    order: Tensor  # [T or more] tokens, chunk by chunk
    first: Tensor  # [C or more] index in `order` of each chunk's first token
    size: Tensor  # [C or more] number of its tokens; 0: there is no such chunk
    adapter_slot: Tensor  # [C or more] slot of its adapter


class SlotWeights:
    """A and B of all adapter slots for one matrix, or for the rows of a table."""

    def __init__(
        self,
        num_adapter_slots: int,
        in_size: int,
        sizes: Sequence[int],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`rank`: the highest, a multiple of RANK_STEP."""
        self.rank = rank
        self.sizes = sizes
        num_ranks = len(sizes) * rank  # of all parts
        out_size = sum(sizes)
        self.a = torch.zeros(num_adapter_slots, num_ranks, in_size, dtype=dtype, device=device)
        self.b = torch.zeros(num_adapter_slots, out_size, rank, dtype=dtype, device=device)
        blocks = []
        begin = 0
        for part, size in enumerate(sizes):
            end = begin + size
            starts = range(begin, end, LORA.outputs)
            blocks += [(first, min(first + LORA.outputs, end), part) for first in starts]
            begin = end
        # [blocks, 3] first column of y, end of the columns, and their part
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=device)

    def put(self, adapter_slot: int, parts: Sequence[LoraPart | None]) -> None:
        self.clear(adapter_slot)
        column = 0
        for index, (part, size) in enumerate(zip(parts, self.sizes, strict=True)):
            if part is not None:
                first = index * self.rank
                self.a[adapter_slot, first : first + len(part.a)].copy_(part.a)
                scaled = part.scale * part.b.float()
                self.b[adapter_slot, column : column + size, : scaled.shape[1]].copy_(scaled)
            column += size

    def clear(self, adapter_slot: int) -> None:
        self.a[adapter_slot].zero_()
        self.b[adapter_slot].zero_()


class SlotRows:
    """A and B of all adapter slots for the rows of a table. A is stored with one line per row."""

    def __init__(
        self,
        num_adapter_slots: int,
        num_rows: int,
        size: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.a = torch.zeros(num_adapter_slots, num_rows, rank, dtype=dtype, device=device)
        self.weights = SlotWeights(num_adapter_slots, 0, (size,), rank, dtype, device)

    def put(self, adapter_slot: int, part: LoraPart) -> None:
        self.clear(adapter_slot)
        self.a[adapter_slot, :, : len(part.a)].copy_(part.a.T)
        scaled = part.scale * part.b.float()
        self.weights.b[adapter_slot, :, : scaled.shape[1]].copy_(scaled)

    def clear(self, adapter_slot: int) -> None:
        self.a[adapter_slot].zero_()
        self.weights.clear(adapter_slot)


class TritonAdapters:
    """The `AdapterOps` of `TritonOps`."""

    has_gains = False

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        num_adapter_slots: int,
        send: Send,
        split: Split,
        *,
        graph_tokens: int = 0,
    ) -> None:
        """`send` copies arrays to the device, into a tensor or new memory, and `split` returns
        views of the arrays there. Steps of up to `graph_tokens` tokens have their `Chunks` at fixed
        addresses."""
        self.dtype = dtype
        self._device = device
        self._num_adapter_slots = num_adapter_slots
        self._send = send
        self._split = split
        self._matrices: dict[Matrix, SlotWeights] = {}
        self._tables: dict[Matrix, SlotRows] = {}
        self._graph_tokens = graph_tokens
        self._fixed: Chunks | None = None
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        if graph_tokens:
            self._numbers = self._send(self._arrays(None, graph_tokens), None)
            self._fixed = self._chunks_of(self._numbers, graph_tokens)
        self._step: Chunks | None = None  # None: no token has an adapter

    def watch(self, matrices: Ranks, tables: Ranks = NO_RANKS) -> None:
        for matrix, rank in matrices.items():
            if matrix not in self._matrices:
                self._matrices[matrix] = SlotWeights(
                    self._num_adapter_slots,
                    in_size_of(matrix),
                    matrix.sizes,
                    _padded(rank),
                    self.dtype,
                    self._device,
                )
        for table, rank in tables.items():
            self._tables[table] = SlotRows(
                self._num_adapter_slots,
                sum(table.sizes),
                in_size_of(table),
                _padded(rank),
                self.dtype,
                self._device,
            )

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        return partial(self._put, parts, tables)

    def _put(self, parts: LoraParts, tables: LoraTables, adapter_slot: int) -> None:
        self.clear(adapter_slot)
        for matrix, of_matrix in parts.items():
            self._matrices[matrix].put(adapter_slot, of_matrix)
        for table, part in tables.items():
            self._tables[table].put(adapter_slot, part)

    def clear(self, adapter_slot: int) -> None:
        for weights in self._matrices.values():
            weights.clear(adapter_slot)
        for rows in self._tables.values():
            rows.clear(adapter_slot)

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        self._step = None
        if adapters is None:
            return
        num_tokens = len(adapters)
        if self._fixed is not None and num_tokens <= self._graph_tokens:
            self._send(self._arrays(adapters, self._graph_tokens), self._numbers)
            self._step = self._fixed
            return
        numbers = self._send(self._arrays(adapters, num_tokens), None)
        self._step = self._chunks_of(numbers, num_tokens)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Within this context, steps use adapters, with the `Chunks` at the fixed addresses."""
        self._step = self._fixed
        try:
            yield
        finally:
            self._step = None

    @property
    def is_active(self) -> bool:
        """Whether a token of the step has an adapter."""
        return self._step is not None

    def add(self, y: Tensor, x: Tensor, matrix: Matrix, places: Tensor | None = None) -> None:
        """Add to y [T, out] the terms of the step's adapters for x [T, in]. `places`: the step's
        tokens that x has; None: all."""
        weights = self._matrices.get(matrix)
        step = self._step
        if step is None or weights is None or not len(x):
            return
        num_chunks = self._num_chunks(len(x))
        if places is not None:
            # One chunk per row, because only the device knows which rows share an adapter.
            num_chunks = len(x)
            step = _row_by_row(step.adapters.index_select(0, places))
        num_ranks = len(weights.sizes) * weights.rank
        inner = torch.empty(len(x), num_ranks, device=x.device)
        in_size = x.shape[1]
        shrink_kernel[(num_chunks, triton.cdiv(num_ranks, LORA.ranks))](
            x,
            weights.a,
            inner,
            *step[1:],
            x.stride(0),
            IN=in_size,
            RANKS=num_ranks,
            CHUNK=LORA.chunk,
            BLOCK_IN=LORA.inputs,
            BLOCK_RANKS=LORA.ranks,
            num_warps=LORA.warps,
        )
        self._expand(y, inner, weights, step, num_chunks)

    def add_rows(self, y: Tensor, ids: Tensor, table: Matrix, scale: float) -> None:
        """Add to y [T, size], the rows `ids` [T] of a table times `scale`, the terms of the step's
        adapters. Ids below 0 get none."""
        rows = self._tables.get(table)
        if self._step is None or rows is None or not len(ids):
            return
        adapters = self._step.adapters[: len(ids)].long()
        lines = adapters.clamp(min=0) * rows.num_rows + ids.clamp(min=0)
        inner = rows.a.view(-1, rows.weights.rank).index_select(0, lines).float()
        inner *= scale * (ids >= 0)[:, None]
        self._expand(y, inner, rows.weights, self._step, self._num_chunks(len(ids)))

    def _expand(
        self,
        y: Tensor,
        inner: Tensor,
        weights: SlotWeights,
        step: Chunks,
        num_chunks: int,
    ) -> None:
        expand_kernel[(num_chunks, len(weights.blocks))](
            inner,
            weights.b,
            y,
            *step[1:],
            weights.blocks,
            y.stride(0),
            OUT=y.shape[1],
            RANKS=inner.shape[1],
            RANK=weights.rank,
            CHUNK=LORA.chunk,
            BLOCK_OUT=LORA.outputs,
            BLOCK_RANK=RANK_STEP,
            num_warps=LORA.warps,
        )

    def _num_chunks(self, num_tokens: int) -> int:
        """Maximum number of chunks of a step: each adapter may have one chunk that is not full."""
        return num_tokens // LORA.chunk + min(num_tokens, self._num_adapter_slots)

    def _lens(self, num_tokens: int) -> list[int]:
        return [num_tokens] * 2 + [self._num_chunks(num_tokens)] * 3

    def _arrays(self, adapters: IntArray | None, num_tokens: int) -> list[IntArray]:
        """The arrays of a step's `Chunks`, padded to a step of `num_tokens` tokens."""
        arrays = [np.zeros(length, np.int32) for length in self._lens(num_tokens)]
        arrays[0][:] = -1
        if adapters is not None:
            blocks, rows = row_blocks(adapters, LORA.chunk)
            arrays[0][: len(adapters)] = adapters
            arrays[1][: len(rows)] = rows
            adapter_slot, first, count = blocks.T
            for array, values in zip(arrays[2:], (first, count, adapter_slot), strict=True):
                array[: len(values)] = values
        return arrays

    def _chunks_of(self, numbers: Tensor, num_tokens: int) -> Chunks:
        return Chunks(*self._split(numbers, self._lens(num_tokens)))


def _row_by_row(adapters: Tensor) -> Chunks:
    rows = torch.arange(len(adapters), dtype=torch.int32, device=adapters.device)
    return Chunks(adapters, rows, rows, (adapters >= 0).int(), adapters)


def _padded(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def in_size_of(matrix: Matrix) -> int:
    """Number of inputs of a matrix."""
    size: int = matrix.get(0, 0, 1).shape[1]
    return size


@triton.jit
def shrink_kernel(
    x_ptr,
    a_ptr,
    inner_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    slot_ptr,
    x_stride,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    chunk = tl.program_id(0)
    count = tl.load(count_ptr + chunk)
    if count > 0:
        adapter_slot = tl.load(slot_ptr + chunk).to(tl.int64)
        row = tl.arange(0, CHUNK)
        at = tl.load(first_ptr + chunk) + row
        token = tl.load(order_ptr + at, mask=row < count, other=0).to(tl.int64)
        rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        acc = tl.zeros((CHUNK, BLOCK_RANKS), tl.float32)
        for begin in range(0, IN, BLOCK_IN):
            column = begin + tl.arange(0, BLOCK_IN)
            x = tl.load(
                x_ptr + token[:, None] * x_stride + column[None, :],
                mask=(row < count)[:, None] & (column < IN)[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptr + (adapter_slot * RANKS + rank[None, :]) * IN + column[:, None],
                mask=(rank < RANKS)[None, :] & (column < IN)[:, None],
                other=0.0,
            )
            acc += tl.dot(x, a, input_precision="ieee")
        tl.store(
            inner_ptr + token[:, None] * RANKS + rank[None, :],
            acc,
            mask=(row < count)[:, None] & (rank < RANKS)[None, :],
        )


@triton.jit
def expand_kernel(
    inner_ptr,
    b_ptr,
    y_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    slot_ptr,
    blocks_ptr,
    y_stride,
    OUT: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    chunk = tl.program_id(0)
    count = tl.load(count_ptr + chunk)
    if count > 0:
        adapter_slot = tl.load(slot_ptr + chunk).to(tl.int64)
        row = tl.arange(0, CHUNK)
        at = tl.load(first_ptr + chunk) + row
        token = tl.load(order_ptr + at, mask=row < count, other=0).to(tl.int64)
        block = blocks_ptr + 3 * tl.program_id(1)
        column = tl.load(block) + tl.arange(0, BLOCK_OUT)
        end = tl.load(block + 1)
        part = tl.load(block + 2)
        acc = tl.zeros((CHUNK, BLOCK_OUT), tl.float32)
        for begin in range(0, RANK, BLOCK_RANK):
            rank = begin + tl.arange(0, BLOCK_RANK)
            inner = tl.load(
                inner_ptr + token[:, None] * RANKS + part * RANK + rank[None, :],
                mask=(row < count)[:, None],
                other=0.0,
            )
            b = tl.load(
                b_ptr + (adapter_slot * OUT + column[None, :]) * RANK + rank[:, None],
                mask=(column < end)[None, :],
                other=0.0,
            )
            acc += tl.dot(inner.to(b.dtype), b, input_precision="ieee")
        mask = (row < count)[:, None] & (column < end)[None, :]
        to = y_ptr + token[:, None] * y_stride + column[None, :]
        y = tl.load(to, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)
