"""What an adapter changes in the product of a module, from what it says of the module's weights.

    pair                        scale B (A x)
    pair with lengths (DoRA)    gain = length / |row of W + scale B A|,  B = gain B
    another matrix N            (N - W) x, with the smaller side as the rank
    rows of a matrix            the same for some rows
    bias n                      shift = n - bias

Processes that have a part of W get NaN for the rest, which must not reach what they compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.executor.lora.kinds.kind import AdapterError, short
from weft.executor.lora.pairs import LARGEST_INPUT, LoraPair
from weft.models.layers.weight import MatrixRows
from weft.ops.lora import LoraPart
from weft.ops.protocol import ROW_STEP

PIECE_ROWS = 16 * ROW_STEP  # rows of a matrix that are in memory as floats at once

# From rows begin to end of a stored tensor to their values [n, columns], in float32.
StoredRows = Callable[[int, int], Tensor]


def stored_rows(rows: MatrixRows) -> StoredRows:
    """Reads the rows of a tensor that is stored in a matrix."""

    def read(begin: int, end: int) -> Tensor:
        found = []
        for run in sorted(rows.runs, key=lambda run: run.begin):
            first = max(begin, run.begin)
            stop = min(end, run.begin + run.size)
            if first < stop:
                offset = run.first - run.begin
                # Rows are read from a multiple of ROW_STEP on.
                start = (first + offset) // ROW_STEP * ROW_STEP
                piece = rows.matrix.get(run.part, start, stop + offset)
                found.append(piece[first + offset - start :].float().cpu())
        return torch.cat(found)

    return read


def added(
    module: str,
    pair: LoraPair,
    rows: StoredRows,
    bias: Tensor | None,
    *,
    num_rows: int,
    is_table: bool,
    dtype: torch.dtype,
) -> LoraPart:
    """What a pair adds to the product of a module. `rows`: the `num_rows` rows of the module's
    weights in the model; `bias` [out]: its bias. Raises AdapterError."""
    shift = None if pair.shift is None else pair.scale * pair.shift
    if pair.bias is not None:
        assert bias is not None
        more = (pair.bias - bias.float().cpu()).nan_to_num(0.0)
        shift = more if shift is None else shift + more
    if pair.b is None:
        a, b = _rows_changed(pair, rows, num_rows) if pair.ids else _difference(pair.a, rows)
        if is_table:
            a, b = b.T, a.T
        return LoraPart(
            a.to(dtype),
            b.to(dtype),
            scale=1.0,
            shift=shift,
        )
    if pair.length is None:
        return LoraPart(pair.a, pair.b, pair.scale, shift=shift)
    gain = _gain(module, pair, rows, is_table)
    b = gain[:, None] * pair.b.float()
    return LoraPart(
        pair.a,
        b.to(dtype),
        pair.scale,
        gain,
        shift,
    )


def _difference(new: Tensor, rows: StoredRows) -> tuple[Tensor, Tensor]:
    """A [rank, columns] and B [rows, rank] with B A = new - W.

    The rank is that of the smaller side, where A or B is the identity.
    """
    change = new.clone()
    for begin in range(0, len(new), PIECE_ROWS):
        change[begin : begin + PIECE_ROWS] -= rows(begin, begin + PIECE_ROWS)
    change.nan_to_num_(0.0)
    num_rows, num_columns = change.shape
    if num_rows <= num_columns:
        return change, torch.eye(num_rows)
    return torch.eye(num_columns), change


def _rows_changed(pair: LoraPair, rows: StoredRows, num_rows: int) -> tuple[Tensor, Tensor]:
    """The same where only the rows `pair.ids` change.

    A has what is added to them, and B says where.
    """
    old = torch.cat([rows(id, id + 1) for id in pair.ids])
    b = torch.zeros(num_rows, len(pair.ids))
    b[list(pair.ids), torch.arange(len(pair.ids))] = 1.0
    return (pair.a - old).nan_to_num(0.0), b


def _gain(module: str, pair: LoraPair, rows: StoredRows, is_table: bool) -> Tensor:
    """[out] factors of the rows of W + scale B A that make them as long as the adapter says.

    `is_table`: W has a row for each input, so its columns get the lengths. Raises AdapterError.
    """
    assert pair.b is not None
    assert pair.length is not None
    a = pair.a.float()
    b = pair.scale * pair.b.float()
    # The same as the length of each row, squared, but never all of W in floats at once.
    squares = torch.zeros(len(b))
    if is_table:  # W is stored with one row for each input
        for begin in range(0, a.shape[1], PIECE_ROWS):
            change = a[:, begin : begin + PIECE_ROWS].T @ b.T
            squares += (rows(begin, begin + PIECE_ROWS) + change).square().sum(0)
    else:
        for begin in range(0, len(b), PIECE_ROWS):
            of_piece = slice(begin, begin + PIECE_ROWS)
            change = rows(begin, begin + PIECE_ROWS) + b[of_piece] @ a
            squares[of_piece] = change.square().sum(1)
    gain = pair.length / squares.sqrt()
    if squares.isnan().all() or (is_table and squares.isnan().any()):
        raise AdapterError(
            f"the adapter has DoRA in {short(module)}, of which each rank has a part of the "
            "inputs: it is computed with --tp-size 1"
        )
    # Rows of other ranks are NaN; nothing of them is used.
    largest = gain[~squares.isnan()].abs().max()
    if not largest < LARGEST_INPUT:
        raise AdapterError(
            f"lora_magnitude_vector of {short(module)} makes rows {largest.item():.3g} times as "
            f"long; below {LARGEST_INPUT:,.0f} is expected"
        )
    return gain
