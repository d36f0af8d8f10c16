"""Finds what lies between products and attention: the outputs that each head reads, and their norm
and rotation. It runs that part of the graph, and compares the results with those of our own
attention for the same numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.weight import RowRun
from weft.models.transformers_backend.translate.evaluate import (
    as_rows,
    aten,
    concrete,
    evaluated,
    is_layout,
    row_size,
    sources,
)
from weft.models.transformers_backend.translate.graph import MATRIX, Length, TracedValue
from weft.models.transformers_backend.translate.meaning import (
    Group,
    HeadNorm,
    HeadRotation,
    RmsNormed,
)

# Operations of rotations, besides those that move values.
ARITHMETIC = {
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.addcmul.default),
    *(aten.view_as_complex.default, aten.view_as_real.default, aten._to_copy.default),
}
NUM_TOKENS = 4
TOLERANCE = 1e-5  # for numbers around 1


class ProductColumns(NamedTuple):
    """The outputs of a product that heads read."""

    matrix: TracedValue
    places: IntArray  # [heads, D]


class HeadSource(NamedTuple):
    """The origin of queries, keys or values."""

    columns: ProductColumns
    norm: HeadNorm | None
    rotation: HeadRotation | None


class HeadReader:
    """Finds the origin of heads. Positions are below `context_length`."""

    def __init__(
        self, positions: TracedValue, by_position: frozenset[TracedValue], context_length: int
    ) -> None:
        self._positions = positions
        self._by_position = by_position
        self._context_length = context_length
        # By the values of positions that rotate, the size, and the order of pairs.
        self._rotations: dict[tuple[tuple[TracedValue, ...], int, bool], HeadRotation] = {}
        generator = torch.Generator().manual_seed(1)
        self._noise = torch.randn(1 << 20, generator=generator)

    def value(self, node: TracedValue) -> HeadSource | None:
        """The source of heads that are unchanged outputs of a product."""
        source = self._source(node, with_arithmetic=False)
        if source is None or source.op != MATRIX:
            return None
        index = self._index(node, source)
        return None if index is None else HeadSource(ProductColumns(source, index), None, None)

    def rotated(self, node: TracedValue, meanings: dict[TracedValue, object]) -> HeadSource | None:
        """The source of queries or keys: outputs of a product, optionally normed and rotated."""
        source = self._source(node, with_arithmetic=True, stops=meanings)
        if source is None:
            return None
        found = self._rotation(node, source)
        if found is None:
            return None
        index, rotation = found
        meaning = meanings.get(source)
        if not isinstance(meaning, RmsNormed):
            if source.op != MATRIX:
                return None
            return HeadSource(ProductColumns(source, index), None, rotation)
        if not np.array_equal(index.ravel(), np.arange(index.size)):
            return None
        (normed,) = meaning.inputs
        before = self.value(normed)
        if before is None:
            return None
        heads = before.columns.places.reshape(index.shape)
        is_whole = meaning.size == index.size
        if not is_whole and meaning.size != index.shape[1]:
            return None
        norm = HeadNorm(meaning.weight, meaning.eps, meaning.size)
        return HeadSource(ProductColumns(before.columns.matrix, heads), norm, rotation)

    def _source(
        self,
        node: TracedValue,
        *,
        with_arithmetic: bool,
        stops: dict[TracedValue, object] | None = None,
    ) -> TracedValue | None:
        """The only value from which `node` is made, besides values of positions; else None."""

        def passes(each: TracedValue) -> bool:
            if stops is not None and isinstance(stops.get(each), RmsNormed):
                return False
            return is_layout(each) or (with_arithmetic and each.op in ARITHMETIC)

        found = sources(node, passes, self._by_position.__contains__)
        return found[0] if len(found) == 1 and row_size(found[0]) else None

    def _computed(
        self, node: TracedValue, source: TracedValue, rows: Tensor, positions: Tensor
    ) -> Tensor:
        """Compute heads [T, heads, D] from rows [T, size] of the source."""
        num_tokens = len(positions)
        known = {
            source: rows.view(concrete(source.shape, num_tokens)),
            self._positions: positions[None],
        }
        value = evaluated(node, known, num_tokens)
        if len(node.shape) != 4:
            return value.reshape(num_tokens, 1, -1)
        if node.shape[2] == Length(1, 0):
            return value[0].transpose(0, 1)
        return value[0]

    def _index(self, node: TracedValue, source: TracedValue) -> IntArray | None:
        """The index of each head value in a row of the source; None if heads are not just moved
        values."""
        size = row_size(source)
        rows = torch.arange(NUM_TOKENS * size, dtype=torch.float64).view(NUM_TOKENS, size)
        positions = torch.zeros(NUM_TOKENS, dtype=torch.long)
        found = self._computed(node, source, rows, positions)
        found = found - (torch.arange(NUM_TOKENS) * size)[:, None, None]
        if not torch.equal(found, found[:1].expand_as(found)) or found.min() < 0:
            return None
        if found.max() >= size:
            return None
        index: IntArray = found[0].to(torch.int32).numpy()
        return index

    def _rotation(
        self, node: TracedValue, source: TracedValue
    ) -> tuple[IntArray, HeadRotation | None] | None:
        """The index in a row from which each value of a head comes, and the rotation, if any."""
        size = row_size(source)
        start = torch.zeros(NUM_TOKENS, dtype=torch.long)
        ones = torch.ones(NUM_TOKENS, size)
        ramp = torch.arange(1.0, size + 1).expand(NUM_TOKENS, size).contiguous()
        # At position 0 nothing is rotated, but values may be scaled.
        unit = self._computed(node, source, ones, start)
        if not bool((unit > 0).all()):
            return None
        places = self._computed(node, source, ramp, start) / unit - 1
        found = places.round()
        is_exact = (places - found).abs().max() < 0.1
        if not is_exact or not torch.equal(found, found[:1].expand_as(found)):
            return None
        index: IntArray = found[0].to(torch.int32).numpy()
        last = self._context_length - 1
        positions = torch.tensor([1, last // 3, last // 2, last]).clamp(min=0)
        noise = self._noise[: NUM_TOKENS * size].view(NUM_TOKENS, size)
        expected = self._computed(node, source, noise, positions)
        plain = noise[:, torch.from_numpy(index)]
        differs = (expected - plain).abs().amax(dim=(0, 1)) > TOLERANCE
        if not differs.any():
            return index, None
        rotary_dim = int(differs.nonzero().max()) + 1
        for rotation in self._candidates(node, rotary_dim):
            turned = plain.clone()
            turned[..., :rotary_dim] = rotated(plain[..., :rotary_dim], rotation, positions)
            if (turned - expected).abs().max() <= TOLERANCE * 10:
                return index, rotation
        return None

    def _candidates(self, node: TracedValue, rotary_dim: int) -> list[HeadRotation]:
        """Possible rotations from the values of positions with which the heads are computed."""
        if rotary_dim % 2:
            return []
        tables = self._tables(node)
        found: list[HeadRotation] = []
        for is_side_by_side in (False, True):
            key = (tuple(tables), rotary_dim, is_side_by_side)
            if key not in self._rotations:
                pair = self._pair(tables, rotary_dim // 2, is_side_by_side)
                if pair is None:
                    continue
                self._rotations[key] = HeadRotation(*pair, is_side_by_side)
            found.append(self._rotations[key])
        return found

    def _tables(self, node: TracedValue) -> list[TracedValue]:
        """The values of positions with which a head is computed."""
        found: list[TracedValue] = []
        seen: set[TracedValue] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            if current in self._by_position:
                base = as_rows(current)
                if base not in found and Length(1, 0) in base.shape:
                    found.append(base)
            elif is_layout(current) or current.op in ARITHMETIC:
                pending += reversed(current.inputs)
        return found

    def _pair(
        self, tables: list[TracedValue], num_pairs: int, is_side_by_side: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [context, pairs], if these tables hold them."""
        positions = torch.arange(self._context_length)
        contents = []
        for table in tables:
            value = evaluated(table, {self._positions: positions[None]}, self._context_length)
            contents.append(value.reshape(self._context_length, -1))
        if len(contents) == 1 and contents[0].is_complex():
            contents = [contents[0].real, contents[0].imag]
        if len(contents) != 2:
            return None
        # At position 0 the cosine is 1 (or the common factor), and the sine is 0.
        contents.sort(key=lambda each: -float(each[0].abs().sum()))
        pair: list[Tensor] = []
        for content in contents:
            width = content.shape[1]
            if width == num_pairs:
                pair.append(content.float().contiguous())
            elif width == 2 * num_pairs:
                step = 2 if is_side_by_side else 1
                halves = content[:, 0 : num_pairs * step : step]
                pair.append(halves.float().contiguous())
            else:
                return None
        return pair[0], pair[1]


def rotated(x: Tensor, rotation: HeadRotation, positions: Tensor) -> Tensor:
    """Rotate x [T, heads, size] as our kernels do."""
    cos = rotation.cos[positions][:, None]
    sin = rotation.sin[positions][:, None]
    if rotation.is_side_by_side:
        first = x[..., 0::2]
        second = x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if rotation.is_side_by_side:
        return torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat(turned, dim=-1)


def grouped(heads: tuple[HeadSource, HeadSource, HeadSource]) -> Group | None:
    """The one product that yields queries, keys and values, one after the other; None if their
    matrices have other outputs, too."""
    taken: dict[str, list[tuple[int, IntArray]]] = {}
    sizes: dict[str, int] = {}
    for part, head in enumerate(heads):
        matrix = head.columns.matrix
        taken.setdefault(matrix.name, []).append((part, head.columns.places.ravel()))
        sizes[matrix.name] = row_size(matrix)
    runs: dict[str, list[RowRun]] = {}
    for name, parts in taken.items():
        owner = np.full(sizes[name], -1, np.int32)
        position = np.zeros(sizes[name], np.int32)
        num_taken = 0
        for part, index in parts:
            owner[index] = part
            position[index] = np.arange(len(index))
            num_taken += len(index)
        if num_taken != sizes[name] or (owner < 0).any():
            return None
        runs[name] = _runs(owner, position)
    return Group(tuple(head.columns.places.size for head in heads), runs)


def _runs(owner: IntArray, position: IntArray) -> list[RowRun]:
    """Runs of consecutive rows of a matrix that are also consecutive in a part."""
    cuts = np.flatnonzero((np.diff(owner) != 0) | (np.diff(position) != 1)) + 1
    begins = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(owner)]
    found = []
    for begin, end in zip(begins, ends, strict=True):
        found.append(RowRun(int(owner[begin]), int(position[begin]), begin, end - begin))
    return found
