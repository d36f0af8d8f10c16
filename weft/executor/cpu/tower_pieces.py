"""Operations of a tower, cut into pieces of a few milliseconds.

One operation of a layer takes tens of milliseconds for a large picture, and running requests would
wait for all of it. A product is cut by rows, and attention by the tokens that ask; every row is
computed as it is in the whole, and so has the same bits. All other operations are short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from weft.arrays import IntArray
from weft.ops.cpp.abi import (
    AttentionArgs,
    KvCache,
    LinearArgs,
    PackedWeight,
    StepArgs,
)
from weft.ops.cpp.library import Library

FLOAT_BYTES = 4
PIECE_FLOPS = 1 << 30  # of a piece: 3 ms in bfloat16 with AVX-512, 8 in float32 with AVX2
LEAST_ROWS = 128  # fewer do not pay for reading weights, or packing keys, once more
ROW_STEP = 32  # what kernels take at a time divides it

Copied = TypeVar("Copied", bound=ctypes.Structure)


class Rows(NamedTuple):
    """Some of the rows of an operation."""

    first: int
    num: int


def run_in_pieces(
    library: Library,
    args: ctypes.Structure,
    step: StepArgs,
    *,
    cuts_attention: bool = True,
) -> Iterator[None]:
    """Run an operation on the rows of a step, in pieces. Raises MemoryError.

    `cuts_attention`: False where it is computed in another way if it is whole.
    """
    if isinstance(args, LinearArgs):
        yield from _multiply(library, args, step)
        return
    if isinstance(args, AttentionArgs) and cuts_attention and step.num_requests == 1:
        parts = cut(step.num_tokens, _flops_of_attention(args, step.num_tokens))
        if len(parts) > 1:
            yield from _attend(library, args, step, parts)
            return
    library.run_one(args, step)
    yield


def cut(num_rows: int, flops_of_row: int) -> list[Rows]:
    """Rows in parts of nearly one size, each of about `PIECE_FLOPS`."""
    fitting = PIECE_FLOPS // flops_of_row // ROW_STEP * ROW_STEP
    num_parts = -(-num_rows // max(fitting, LEAST_ROWS))
    num_steps = -(-num_rows // ROW_STEP)
    parts = []
    first = 0
    for part in range(1, num_parts + 1):
        end = num_steps * part // num_parts * ROW_STEP
        end = min(end, num_rows)
        parts.append(Rows(first, end - first))
        first = end
    return parts


def _multiply(
    library: Library,
    args: LinearArgs,
    step: StepArgs,
) -> Iterator[None]:
    for rows in cut(step.num_tokens, _flops_of_product(args)):
        own = _copied(args)
        own.x = args.x + rows.first * args.x_stride * FLOAT_BYTES
        own.y = args.y + rows.first * args.y_stride * FLOAT_BYTES
        library.run_one(own, _with_rows(step, rows))
        yield


def _attend(
    library: Library,
    args: AttentionArgs,
    step: StepArgs,
    parts: list[Rows],
) -> Iterator[None]:
    """Tokens of one request that see all of it, some at a time: each stands after those before it,
    and sees as far as the last one."""
    num_tokens = step.num_tokens
    head_dim = KvCache.from_address(args.cache).head_dim
    row_bytes = args.heads * head_dim * FLOAT_BYTES  # of what it writes
    for rows in parts:
        own = _copied(args)
        own.bidirectional = 0
        own.q = args.q + rows.first * args.q_stride * FLOAT_BYTES
        own.out = args.out + rows.first * row_bytes
        starts: IntArray = np.array([rows.first], dtype=np.int32)
        lens: IntArray = np.array([rows.num], dtype=np.int32)
        sees_to: IntArray = np.full(rows.num, num_tokens, dtype=np.int32)
        of_piece = _with_rows(step, rows)
        of_piece.starts = starts.ctypes.data
        of_piece.lens = lens.ctypes.data
        of_piece.sees_to = sees_to.ctypes.data
        library.run_one(own, of_piece)
        yield


def _with_rows(step: StepArgs, rows: Rows) -> StepArgs:
    own = _copied(step)
    own.num_tokens = rows.num
    return own


def _copied(args: Copied) -> Copied:
    return type(args).from_buffer_copy(args)


def _flops_of_product(args: LinearArgs) -> int:
    """Of one row."""
    weight = PackedWeight.from_address(args.weight)
    num_weights = int(weight.in_size * weight.out_size)
    return 2 * num_weights


def _flops_of_attention(args: AttentionArgs, num_keys: int) -> int:
    """Of one row: products with keys, and with values."""
    head_dim = KvCache.from_address(args.cache).head_dim
    size = int(args.heads * head_dim)
    return 2 * 2 * size * num_keys
