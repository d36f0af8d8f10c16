"""Steps of the CPU kernels that are one call of the library, from the plan's numbers to the tokens.

That is every step whose tokens are chosen from the model's output as it is, or as grammars leave it, greedily or drawn.
Masks that are still on their way are waited for first: the kernels take all cores. Between two large matrices Python
finds its code and data out of the caches, and each function of torch or numpy costs some microseconds: here a handful
of them is left. `RowTable.apply` and `sample` are the specification, and do what is not done here; both
sides share the row table and the model's programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from weft.executor.cpu.program_model import Recorded, RecordedModel
from weft.executor.inputs import RowTable
from weft.ops.cpp import abi
from weft.ops.cpp.library import Library
from weft.ops.cpp.program import Program
from weft.plan.step import Mask, Plan, Result, Sampling

DRAWS = {  # of `Sampling`, in the order and the types of `abi.DrawArgs`
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seeds": np.int64,
    "positions": np.int32,
}


class WholeSteps:
    def __init__(self, model: RecordedModel, rows: RowTable, library: Library) -> None:
        self._model, self._rows, self._library = model, rows, library
        num_rows, context_length = rows.slots.shape
        self._chosen, self._peaks = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
        self._tokens, self._invalid = np.empty(num_rows, np.int32), np.empty(num_rows, np.bool_)
        self._draws = {name: np.empty(num_rows, dtype) for name, dtype in DRAWS.items()}
        self._numbers = self._columns = np.empty(0)
        self._body: Recorded | None = None
        self._head: Recorded | None = None
        self._greedy = self._drawing = Program([], [])
        self._mask = abi.MaskArgs()
        self._masked = self._words = np.empty(0)
        self._whole = abi.WholeStep(
            table=rows.slots.data_ptr(),
            num_rows=num_rows,
            table_stride=context_length,
            last_tokens=rows.last_tokens.data_ptr(),
            chosen=self._chosen.ctypes.data,
            peaks=self._peaks.ctypes.data,
            tokens=self._tokens.ctypes.data,
            invalid=self._invalid.ctypes.data,
        )

    def takes(self, plan: Plan) -> bool:
        """Whether a step is of this kind."""
        return (
            plan.sampling.is_plain
            and plan.wanted is None
            and plan.vectors is None
            and plan.num_tokens > 0
        )

    def run(self, plan: Plan) -> Ready:
        """Compute a step that it takes. Raises MemoryError."""
        if plan.table is not None:
            self._rows.write(plan.table)
        whole, num = self._whole, len(plan.sampling.positions)
        whole.num_tokens, whole.num_requests, whole.num_sampling = (
            plan.num_tokens,
            len(plan.rows),
            num,
        )
        self._make_room(plan.num_tokens, num)
        columns = (plan.rows, plan.starts, plan.lens, plan.samples, plan.tokens, plan.slots)
        np.concatenate(columns, out=self._numbers[: 4 * len(plan.rows) + 2 * plan.num_tokens])
        self._forbid(plan.sampling.mask)
        head = self._greedy if plan.sampling.is_greedy else self._drawing_by(plan.sampling, num)
        whole.head, whole.num_head = head.address, len(head.args)
        self._library.run_whole(whole)
        invalid = self._invalid[:num].copy() if whole.num_invalid else None
        result = Result(self._tokens[:num].copy(), invalid)
        return Ready(
            result if plan.sampling.mask is None else _with_faults(result, plan.sampling.mask)
        )

    def _forbid(self, mask: Mask | None) -> None:
        """What the mask does not allow, if there is one."""
        args = self._mask
        args.num_masks = 0
        if mask is not None:
            self._words, self._masked = (
                np.ascontiguousarray(mask.promise.words),
                mask.index.astype(np.int64),
            )
            args.num_masks, args.mask_stride = len(mask.index), self._words.size // len(mask.index)
            args.masks, args.rows = self._words.ctypes.data, self._masked.ctypes.data

    def _drawing_by(self, sampling: Sampling, num: int) -> Program:
        for name, column in self._draws.items():
            column[:num] = getattr(sampling, name)
        return self._drawing

    def _make_room(self, num_tokens: int, num_sampling: int) -> None:
        """Have programs, and places for their numbers, that are large enough."""
        body, head, whole = (
            self._model.body_for(num_tokens),
            self._model.head_for(num_sampling),
            self._whole,
        )
        if body is not self._body:
            self._body = body
            self._numbers = np.empty(4 * len(self._tokens) + 2 * body.capacity, np.int32)
            self._columns = np.empty(3 * body.capacity, np.int64)
            whole.numbers, whole.columns = self._numbers.ctypes.data, self._columns.ctypes.data
            whole.body, whole.num_body = body.program.address, len(body.program.args)
            whole.hidden, whole.hidden_size = body.output.data_ptr(), body.output.shape[1]
        if head is not self._head:
            self._head = head
            whole.last = head.input.data_ptr()
            rows = (head.output.data_ptr(), head.output.shape[1], head.output.stride(0))
            peaks, tokens = self._peaks.ctypes.data, self._chosen.ctypes.data
            draws = (column.ctypes.data for column in self._draws.values())
            self._mask.logits, self._mask.vocab_size, self._mask.stride = rows
            self._greedy = head.program.then(self._mask, abi.ArgmaxArgs(*rows, tokens, peaks))
            self._drawing = self._greedy.then(abi.DrawArgs(*rows, peaks, *draws, tokens))


def _with_faults(result: Result, mask: Mask) -> Result:
    """The rows whose masks could not be made are invalid."""
    faults = tuple((int(mask.index[i]), fault) for i, fault in mask.promise.faults.items())
    if not faults:
        return result
    invalid = np.zeros(len(result.tokens), np.bool_) if result.invalid is None else result.invalid
    invalid[[place for place, _ in faults]] = True
    return replace(
        result, invalid=invalid, faults=faults, tokens=np.where(invalid, np.int32(0), result.tokens)
    )


class Ready(NamedTuple):
    """The `Outcome` of a step whose result is there."""

    value: Result

    def moved(self, move: Callable[[Tensor], Tensor]) -> Ready:
        return self

    def result(self) -> Result:
        return self.value
