"""The slots of all requests of a step one behind the other, for kernels that want a list and not a table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # slots that one program copies


def slot_indices(table: Tensor, rows: Tensor, indptr: Tensor, max_len: int, out: Tensor) -> None:
    """out[indptr[r] : indptr[r + 1]] = the first slots of table[rows[r]], for every request r; all int32.

    table [max_rows, context]; rows [R]; indptr [R + 1], rising by at most `max_len`; out has room for indptr[R].
    """
    slot_indices_kernel[(len(rows), triton.cdiv(max_len, BLOCK))](
        table, rows, indptr, out, table.stride(0), BLOCK=BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "indptr_ptr"])
def slot_indices_kernel(
    table_ptr, rows_ptr, indptr_ptr, out_ptr, table_stride, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    begin = tl.load(indptr_ptr + request)
    num = tl.load(indptr_ptr + request + 1) - begin
    first = tl.program_id(1) * BLOCK
    if first < num:
        n = first + tl.arange(0, BLOCK)
        row = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
        slots = tl.load(row + n, mask=n < num, other=0)
        tl.store(out_ptr + begin.to(tl.int64) + n, slots, mask=n < num)
