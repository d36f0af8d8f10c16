"""From a Plan to the tensors of a step, with the tables that stay on the device between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
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

    def apply(self, plan: Plan) -> Inputs:
        """Write the plan's slots into the table and lay out its tokens."""
        assert plan.lens.min(initial=1) > 0, "a request without tokens"
        assert int(plan.lens.sum()) == plan.num_tokens == len(plan.slots), "lens, tokens and slots disagree"
        if plan.table is not None:
            self._write(plan.table)
        positions = _ranges(plan.starts, plan.lens)
        rows = np.repeat(plan.rows, plan.lens)
        self._scatter(rows, positions, plan.slots)
        tokens = self._tokens(plan.tokens, rows)
        last = self._to_device(np.cumsum(plan.lens, dtype=np.int64)[plan.samples] - 1)
        return Inputs(
            tokens=tokens,
            positions=self._to_device(positions),
            batch=AttentionBatch(plan.rows, plan.starts, plan.lens, self._to_device(plan.slots), self.slots),
            last=last,
            sampling_rows=self._to_device(plan.rows[plan.samples]),
            last_tokens=tokens[last],
        )

    def _write(self, writes: TableWrites) -> None:
        """Where two writes meet the later one counts: a scatter has no order, so the earlier ones are left out."""
        rows, columns = np.repeat(writes.rows, writes.lens), _ranges(writes.starts, writes.lens)
        if len(writes.rows) > 1:
            place = rows.astype(np.int64) * self.slots.shape[1] + columns
            _, from_end = np.unique(place[::-1], return_index=True)
            keep = len(place) - 1 - from_end
            self._scatter(rows[keep], columns[keep], writes.slots[keep])
        else:
            self._scatter(rows, columns, writes.slots)

    def _scatter(self, rows: IntArray, columns: LongArray, slots: IntArray) -> None:
        max_rows, context_length = self.slots.shape
        assert rows.max(initial=0) < max_rows, "a row beyond the table"
        assert columns.max(initial=0) < context_length, "a token beyond the context length"
        place = rows.astype(np.int64) * context_length + columns
        self.slots.view(-1)[self._to_device(place)] = torch.tensor(slots, dtype=torch.int32, device=self.slots.device)

    def _tokens(self, tokens: IntArray, rows: IntArray) -> Tensor:
        """Tokens [T], those sampled last filled in."""
        filled = self._to_device(tokens)
        unknown = np.flatnonzero(tokens == LAST_SAMPLED)
        if len(unknown):
            filled[self._to_device(unknown)] = self.last_tokens[self._to_device(rows[unknown])]
        return filled

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        """As int64."""
        return torch.from_numpy(array.astype(np.int64)).to(self.slots.device)


def _ranges(starts: IntArray, lens: IntArray) -> LongArray:
    """starts[0], starts[0] + 1, ... (lens[0] of them), starts[1], ..."""
    shift = starts.astype(np.int64) - (np.cumsum(lens, dtype=np.int64) - lens)
    return np.repeat(shift, lens) + np.arange(int(lens.sum()))
