"""Adapters (LoRA) in products and tables.

    product  y = gain W x + scale B (A x) + shift   for the tokens of an adapter
    table    y = gain (row t of W) + scale B (column t of A)
                                                    for the row of token t, in an embedding

Each loaded adapter has a slot: 0, 1, ... A token has the adapter of one slot, or none. A matrix
that is both head and table has separate parts for the two. Torch is the specification; the CPU
kernels are in `cpp/lora.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, consecutive
from weft.ops.protocol import Matrix


class LoraPart(NamedTuple):
    """The weights of an adapter for one part of a matrix, or for the rows of a table: there `in` is
    the number of rows, and `size of the part` their length. A bias of the matrix comes last."""

    a: Tensor  # [rank, in]
    b: Tensor  # [size of the part, rank]
    scale: float
    gain: Tensor | None = None  # [size of the part] float32; None: 1
    shift: Tensor | None = None  # [size of the part] float32; None: 0; never of a table


# By matrix, for each of its parts; None: the adapter does not change this part.
LoraParts: TypeAlias = Mapping[Matrix, Sequence[LoraPart | None]]
# By the matrix whose rows are looked up.
LoraTables: TypeAlias = Mapping[Matrix, LoraPart]
NO_TABLES: LoraTables = {}
Ranks: TypeAlias = Mapping[Matrix, int]  # the highest of each matrix
NO_RANKS: Ranks = {}
PutAdapter: TypeAlias = Callable[[int], None]  # puts an adapter into a slot; called once


class AdapterOps(Protocol):
    """The adapters that products can add."""

    dtype: torch.dtype  # of the stored adapters
    has_gains: bool  # whether parts may have a gain or a shift

    def watch(self, matrices: Ranks, tables: Ranks = NO_RANKS) -> None:
        """Name the matrices whose products adapters may change, and the tables whose rows they may
        change, with the highest rank for each. Called once, before anything is computed."""
        ...

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        """Lay out an adapter. May run on another thread, one at a time, while steps are computed.
        The returned function puts the adapter into a slot, replacing an earlier one; it is called
        between two steps. If `prepare` raises, nothing has changed."""
        ...

    def clear(self, adapter_slot: int) -> None:
        """Remove the adapter of a slot."""
        ...

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        """Set the adapters of the step's tokens, until the next call: [T] the slot of each token's
        adapter, or -1; None: no token has one. `sampled` [S]: the same for the tokens whose logits
        are computed; None: nothing computes them alone."""
        ...


class TokensOf(NamedTuple):
    """The tokens of a step that have one adapter."""

    adapter_slot: int
    tokens: Tensor  # [n] int64


class TorchAdapters:
    """Adapters of the matrices of `PlainOps`."""

    has_gains = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._loaded: dict[int, LoraParts] = {}  # by adapter slot
        self._tables: dict[int, LoraTables] = {}
        self._adapters: IntArray = np.empty(0, np.int32)  # of the step's tokens
        self._step: list[TokensOf] = []

    def watch(self, matrices: Ranks, tables: Ranks = NO_RANKS) -> None:
        """Does nothing: matrices are looked up when they are used."""

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        return partial(self._put, parts, tables)

    def _put(self, parts: LoraParts, tables: LoraTables, adapter_slot: int) -> None:
        self._loaded[adapter_slot] = {
            matrix: [self._there(part) for part in of_matrix] for matrix, of_matrix in parts.items()
        }
        self._tables[adapter_slot] = {matrix: self._moved(part) for matrix, part in tables.items()}

    def clear(self, adapter_slot: int) -> None:
        self._loaded.pop(adapter_slot, None)
        self._tables.pop(adapter_slot, None)

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        self._step = []
        if adapters is not None:
            self._adapters = adapters
            self._step = self._tokens_of(adapters)

    def add(
        self,
        y: Tensor,
        x: Tensor,
        matrix: Matrix,
        places: Tensor | None = None,
        of_parts: range | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Change y [T, out] as the step's adapters do for x [T, in]. `places`: the step's tokens
        that x has; None: all. `of_parts`: the parts that y has; None: all. `bias` [out]: what y
        contains besides the product."""
        step = self._step
        if step and places is not None:
            step = self._tokens_of(self._adapters[places.numpy(force=True)])
        for adapter_slot, tokens in step:
            parts = self._loaded[adapter_slot].get(matrix, ())
            sizes = matrix.sizes
            if of_parts is not None:
                chosen = slice(of_parts.start, of_parts.stop)
                parts, sizes = parts[chosen], sizes[chosen]
            rows = None
            for part, columns in zip(parts, _columns(sizes), strict=False):
                if part is None:
                    continue
                if rows is None:
                    rows = x[tokens]
                added = part.scale * ((rows @ part.a.T) @ part.b.T)
                if part.gain is not None:
                    y[tokens, columns] = (y[tokens, columns] * part.gain).to(y.dtype)
                    if bias is not None:
                        added = added + (1 - part.gain) * bias[columns]
                if part.shift is not None:
                    added = added + part.shift
                y[tokens, columns] += added.to(y.dtype)

    def add_rows(self, y: Tensor, ids: Tensor, table: Matrix, scale: float) -> None:
        """Add to y [T, size], the rows `ids` [T] of a table times `scale`, the terms of the step's
        adapters. Ids below 0 get none."""
        for adapter_slot, tokens in self._step:
            part = self._tables[adapter_slot].get(table)
            if part is None:
                continue
            found = tokens[ids[tokens] >= 0]
            added = part.a.T[ids[found]] @ part.b.T
            if part.gain is not None:
                y[found] = (y[found] * part.gain).to(y.dtype)
            y[found] += (scale * part.scale) * added

    def _tokens_of(self, adapters: IntArray) -> list[TokensOf]:
        found = []
        for adapter_slot in np.unique(adapters[adapters >= 0]).tolist():
            tokens = torch.from_numpy(np.flatnonzero(adapters == adapter_slot))
            found.append(TokensOf(adapter_slot, tokens.to(self._device)))
        return found

    def _there(self, part: LoraPart | None) -> LoraPart | None:
        return None if part is None else self._moved(part)

    def _moved(self, part: LoraPart) -> LoraPart:
        return LoraPart(
            part.a.to(self._device, self.dtype),
            part.b.to(self._device, self.dtype),
            part.scale,
            None if part.gain is None else part.gain.to(self._device),
            None if part.shift is None else part.shift.to(self._device),
        )


def row_blocks(adapters: IntArray, most_rows: int) -> tuple[IntArray, IntArray]:
    """Divide the tokens that have an adapter into blocks of at most `most_rows` tokens with the
    same adapter.

    `adapters` [T]: the slot of each token's adapter, or -1. Returns the blocks [N, 3] (slot of
    the adapter, first index into the tokens, number of tokens), and the tokens, block by block.
    """
    order = np.argsort(adapters, kind="stable")
    rows = order[np.searchsorted(adapters[order], 0) :].astype(np.int32)
    of_rows = adapters[rows]
    starts = np.flatnonzero(np.diff(of_rows, prepend=-1))
    lens = np.diff(starts, append=len(rows))
    counts = -(-lens // most_rows)
    within = consecutive(np.zeros(len(counts), np.int64), counts) * most_rows
    first = np.repeat(starts, counts) + within
    num_rows = np.minimum(np.repeat(lens, counts) - within, most_rows)
    blocks = np.stack((of_rows[first], first, num_rows), axis=1)
    return np.ascontiguousarray(blocks, np.int32), rows


def _columns(sizes: Sequence[int]) -> list[slice]:
    found = []
    begin = 0
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += size
    return found
