"""Adapters (LoRA) in products and tables.

    product    y = W x + scale B (A x)                   for the tokens of an adapter
    table      y = row t of W + scale B (column t of A)  where a token's row is looked up

Adapters are known by place, 0, 1, ...; a token has the adapter of one place, or none. A matrix that
is head and table has what is added to each by itself. Torch is the specification; the CPU kernels
are in `cpp/lora.py`.
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
    """What an adapter adds to one part of a matrix, or to the rows of a table: then `in` is their
    number, and `size of the part` how long they are."""

    a: Tensor  # [rank, in]
    b: Tensor  # [size of the part, rank]
    scale: float


# By matrix, for each of its parts; None: the adapter leaves it alone.
LoraParts: TypeAlias = Mapping[Matrix, Sequence[LoraPart | None]]
# By the matrix whose rows are looked up.
LoraTables: TypeAlias = Mapping[Matrix, LoraPart]
NO_TABLES: LoraTables = {}
PutAdapter: TypeAlias = Callable[[int], None]  # into a place; once


class AdapterOps(Protocol):
    """The adapters that products can add."""

    dtype: torch.dtype  # in which they are kept

    def watch(self, matrices: Sequence[Matrix], tables: Sequence[Matrix] = ()) -> None:
        """These are the matrices whose products adapters may change, and those whose rows. Once,
        before anything is computed."""
        ...

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        """Lay out an adapter; on any one thread, while steps are computed. Returns what keeps it
        in a place, instead of what was there, between two steps. If it raises, nothing has
        changed."""
        ...

    def clear(self, place: int) -> None:
        """Forget the adapter in a place."""
        ...

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        """Products until the next call are of tokens with these adapters: [T] the place of each, or
        -1; None: no token has one. `sampled` [S]: the same of the tokens behind which one is
        sampled."""
        ...


class TokensOf(NamedTuple):
    """The tokens of a step that have one adapter."""

    place: int
    tokens: Tensor  # [n] int64


class TorchAdapters:
    """Adapters of the matrices of `PlainOps`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._loaded: dict[int, LoraParts] = {}  # by place
        self._tables: dict[int, LoraTables] = {}
        self._adapters: IntArray = np.empty(0, np.int32)  # of the step's tokens
        self._step: list[TokensOf] = []

    def watch(self, matrices: Sequence[Matrix], tables: Sequence[Matrix] = ()) -> None:
        """A matrix is looked up when it is used."""

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        return partial(self._put, parts, tables)

    def _put(self, parts: LoraParts, tables: LoraTables, place: int) -> None:
        self._loaded[place] = {
            matrix: [self._there(part) for part in of_matrix] for matrix, of_matrix in parts.items()
        }
        self._tables[place] = {matrix: self._moved(part) for matrix, part in tables.items()}

    def clear(self, place: int) -> None:
        self._loaded.pop(place, None)
        self._tables.pop(place, None)

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
    ) -> None:
        """Add to y [T, out] what the adapters of the step's tokens make of x [T, in]; or of those
        at `places`, or what they do to some parts alone."""
        step = self._step
        if step and places is not None:
            step = self._tokens_of(self._adapters[places.numpy(force=True)])
        for place, tokens in step:
            parts = self._loaded[place].get(matrix, ())
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
                y[tokens, columns] += added

    def add_rows(self, y: Tensor, ids: Tensor, table: Matrix, scale: float) -> None:
        """Add to the rows y [T, size] of a table, times `scale`, what the adapters of the step's
        tokens add to those of `ids` [T]; to none whose id is below 0."""
        for place, tokens in self._step:
            part = self._tables[place].get(table)
            if part is None:
                continue
            found = tokens[ids[tokens] >= 0]
            added = part.a.T[ids[found]] @ part.b.T
            y[found] += (scale * part.scale) * added

    def _tokens_of(self, adapters: IntArray) -> list[TokensOf]:
        found = []
        for place in np.unique(adapters[adapters >= 0]).tolist():
            tokens = torch.from_numpy(np.flatnonzero(adapters == place))
            found.append(TokensOf(place, tokens.to(self._device)))
        return found

    def _there(self, part: LoraPart | None) -> LoraPart | None:
        return None if part is None else self._moved(part)

    def _moved(self, part: LoraPart) -> LoraPart:
        a = part.a.to(self._device, self.dtype)
        return LoraPart(a, part.b.to(self._device, self.dtype), part.scale)


def row_blocks(adapters: IntArray, most_rows: int) -> tuple[IntArray, IntArray]:
    """The tokens that have an adapter, cut into blocks with one each, of `most_rows` at most: the
    place, the first and the number of each block, [N, 3], and the tokens, block by block.

    `adapters` [T]: the place of each token's adapter, or -1.
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
