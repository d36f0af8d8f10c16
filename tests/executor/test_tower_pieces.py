"""Operations of towers in pieces: the same bits as at once, and none of them is long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.executor.cpu import tower_pieces
from weft.executor.cpu.tower import PAIRS, CppTowerBackend
from weft.executor.cpu.tower_pieces import LEAST_ROWS, PIECE_FLOPS, Rows, cut
from weft.models.vision.tower import Pieces
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.build import processor_flags
from weft.ops.cpp.library import Library, load

HIDDEN = 64
HEADS = 4
ROWS = 420


class Layer:
    """A product, attention and a product that is added: all that is cut."""

    def __init__(self, format: WeightFormat, library: Library) -> None:
        self.backend = CppTowerBackend(library, format)
        self._attention = self.backend.make_attention(HEADS, HIDDEN // HEADS)
        self._qkv = self.backend.ops.matrix(HIDDEN, (3 * HIDDEN,), bias=True)
        self._out = self.backend.ops.matrix(HIDDEN, (HIDDEN,), bias=True)
        random = torch.Generator().manual_seed(0)
        for matrix in (self._qkv, self._out):
            size = sum(matrix.sizes)
            matrix.put(0, torch.randn(size, HIDDEN, generator=random))

    def part(self, x: Tensor) -> Tensor:
        ops = self.backend.ops
        seen = self._attention.forward(ops.computed(ops.linear(x, self._qkv)))
        return ops.computed(ops.linear(seen, self._out))

    def prepare(self, *lens: int) -> None:
        self._attention.prepare(lens)


def counted(pieces: Pieces) -> tuple[int, Tensor]:
    """How many pieces there are, and what they make."""
    num = 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return num, end.value
        num += 1


@pytest.mark.parametrize("instruction_set", ["", "portable"])
@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.BF16, WeightFormat.I16])
@pytest.mark.parametrize("lens", [(ROWS,), (100, 320)], ids=["one picture", "two windows"])
def test_pieces_have_the_bits_of_the_whole(
    format: WeightFormat,
    lens: tuple[int, ...],
    instruction_set: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = load(instruction_set)
    layer = Layer(format, library)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    layer.prepare(*lens)
    whole = layer.backend.run(layer.part, x).clone()
    monkeypatch.setattr(tower_pieces, "PIECE_FLOPS", 1)
    num_pieces, found = counted(layer.backend.run_in_pieces(layer.part, x))
    assert torch.equal(found, whole)
    num_parts = -(-ROWS // LEAST_ROWS)
    by_matrix_unit = format == WeightFormat.BF16 and "amx_bf16" in processor_flags()
    by_pairs = format == WeightFormat.BF16 and library.instruction_set in PAIRS
    # Of rounded keys and values.
    num_stores = int(format == WeightFormat.I16 or (by_pairs and not by_matrix_unit))
    is_cut = len(lens) == 1 and not by_matrix_unit
    assert num_pieces == 2 * num_parts + num_stores + (num_parts if is_cut else 1)


def test_what_is_short_is_one_piece() -> None:
    layer = Layer(WeightFormat.F32, load(""))
    layer.prepare(ROWS)
    num_pieces, _ = counted(layer.backend.run_in_pieces(layer.part, torch.zeros(ROWS, HIDDEN)))
    assert num_pieces == 3  # operations


@pytest.mark.parametrize("num_rows", [1, 31, 128, 129, 1_000, 4_096])
@pytest.mark.parametrize("flops", [1, PIECE_FLOPS // 300, 2 * PIECE_FLOPS])
def test_parts_are_all_rows_and_of_nearly_one_size(num_rows: int, flops: int) -> None:
    parts = cut(num_rows, flops)
    ends = [rows.first + rows.num for rows in parts]
    assert [rows.first for rows in parts] == [0, *ends[:-1]]
    assert ends[-1] == num_rows
    assert max(rows.num for rows in parts) * flops <= max(PIECE_FLOPS, LEAST_ROWS * flops)
    assert all(rows.num >= min(LEAST_ROWS // 2, num_rows) for rows in parts)


def test_parts_begin_where_kernels_begin_a_step() -> None:
    assert cut(100, 1) == [Rows(0, 100)]
    assert cut(420, PIECE_FLOPS) == [Rows(0, 96), Rows(96, 128), Rows(224, 96), Rows(320, 100)]
