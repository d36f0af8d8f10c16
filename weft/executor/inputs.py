"""From a Plan to the tensors of a step, with the tables that stay on the device between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.executor.backend import AttentionBatch
from weft.executor.plan import LAST_SAMPLED, IntArray, LongArray, Plan, TableWrites


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step, ready to run. S requests of it sample a token."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    batch: AttentionBatch
    last: Tensor  # [S] int64, where the last token of each sampling request stands in the step
    sampling_rows: Tensor  # [S] int64
    last_tokens: Tensor  # [S] int64, that token


class RowTable:
    """What the device knows of each row: the slots of its tokens, and the token sampled last."""

    def __init__(self, max_rows: int, context_length: int, device: torch.device) -> None:
        self.slots = torch.zeros(max_rows, context_length, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._flat_slots = self.slots.view(-1)

    def apply(self, plan: Plan) -> Inputs:
        """Write the plan's slots into the table and lay out its tokens."""
        assert plan.lens.min(initial=1) > 0, "a request without tokens"
        assert int(plan.lens.sum()) == plan.num_tokens == len(plan.slots), "lens, tokens and slots disagree"
        if plan.table is not None:
            self._write(plan.table)
        rows, positions, ends = _layout(plan.rows, plan.starts, plan.lens)
        given, places, slots, where, of_row, last, sampling_rows = self._to_device(
            *(plan.tokens, positions, plan.slots, self._where(rows, positions), rows),
            *(ends[plan.samples] - 1, plan.rows[plan.samples]),
        )
        self._flat_slots.index_copy_(0, where, slots.int())
        tokens = given
        if plan.tokens.min(initial=0) == LAST_SAMPLED:
            tokens = torch.where(given == LAST_SAMPLED, self.last_tokens.take(of_row), given)
        return Inputs(
            tokens=tokens,
            positions=places,
            batch=AttentionBatch(plan.rows, plan.starts, plan.lens, places, slots, self.slots),
            last=last,
            sampling_rows=sampling_rows,
            last_tokens=tokens.take(last),
        )

    def _write(self, writes: TableWrites) -> None:
        """Where two writes meet the later one counts: a scatter has no order, so the earlier ones are left out."""
        rows, columns, _ = _layout(writes.rows, writes.starts, writes.lens)
        where, slots = self._where(rows, columns), writes.slots
        if len(set(writes.rows.tolist())) < len(writes.rows):
            _, from_end = np.unique(where[::-1], return_index=True)
            keep = len(where) - 1 - from_end
            where, slots = where[keep], slots[keep]
        index, values = self._to_device(where, slots)
        self._flat_slots.index_copy_(0, index, values.int())

    def _where(self, rows: IntArray, columns: IntArray | LongArray) -> LongArray:
        """Places in the table, counted from its beginning."""
        max_rows, context_length = self.slots.shape
        assert rows.max(initial=0) < max_rows, "a row beyond the table"
        assert columns.max(initial=0) < context_length, "a token beyond the context length"
        return rows.astype(np.int64) * context_length + columns

    def _to_device(self, *arrays: IntArray | LongArray) -> tuple[Tensor, ...]:
        """As int64, in one transfer."""
        packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64)).to(self.slots.device)
        return packed.split_with_sizes([len(array) for array in arrays])


def _layout(rows: IntArray, starts: IntArray, lens: IntArray) -> tuple[IntArray, IntArray | LongArray, LongArray]:
    """Row and position of each token: starts[0], starts[0] + 1, ... (lens[0] of them), starts[1], ...; and where the
    tokens of each request end."""
    if (lens == 1).all():
        return rows, starts, np.arange(1, len(lens) + 1)
    ends = np.cumsum(lens, dtype=np.int64)
    return np.repeat(rows, lens), np.repeat(starts - (ends - lens), lens) + np.arange(ends[-1]), ends
