"""From a Plan to the tensors of a step, with the tables that stay on the device between steps.

It knows no request: rows and slots are numbers from the scheduler.

    tokens      | request 0 | request 1 | ...    [T]
    starts             s0          s1            cached tokens of each request
    positions   s0 s0+1 ...  s1 s1+1 ...         [T]
    table       row x position ─▶ slot           stays on the device
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray, LongArray, consecutive
from weft.executor.backend import AttentionBatch, DeviceLayout, WindowBatch
from weft.executor.kv_pool import zeros
from weft.executor.overlap.runs import DeviceRuns, StepRuns, run_columns
from weft.ops.sampling import UploadedSampling
from weft.plan.inputs import HeardMedia, InputOp, InputVectors, MediaVectors
from weft.plan.runs import has_runs
from weft.plan.step import LAST_SAMPLED, Plan, TableWrites, WindowSlots

NUM_COLUMNS = 7  # columns that `DeviceRowTable.apply` sends for every step


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step, ready to run. S tokens are sampled."""

    # [T] int64; below 0 if a vector replaces the token: -1 - its index in `vectors`
    tokens: Tensor
    positions: Tensor  # [T] int64
    batch: AttentionBatch
    last: Tensor  # [S] int64, index in the step of the token before the sampled one
    sampling_rows: Tensor  # [S] int64
    last_tokens: Tensor  # [S] int64, id of that token
    # [V, hidden] float32; wider if an encoder also adds to later layers (`models/vision`)
    vectors: Tensor | None = None
    draws: UploadedSampling | None = (
        None  # how tokens are sampled, if this was copied to the device
    )
    runs: StepRuns | None = None  # the requests that sample several tokens, if runs are kept


class UploadedStep(NamedTuple):
    """The arrays of a step on the device."""

    columns: Sequence[Tensor]  # int64
    layout: DeviceLayout | None  # of the arrays that attention reads, if the host makes the layout
    draws: UploadedSampling | None  # None: every request is greedy


class StepUploader(Protocol):
    """Copies the arrays of steps to a device that is not the CPU."""

    def upload(self, columns: Sequence[IntArray | LongArray], plan: Plan) -> UploadedStep:
        """Copy the columns, the layout of `plan` for attention, and its draws, in one copy."""
        ...

    def to_device(self, arrays: Sequence[IntArray | LongArray]) -> Sequence[Tensor]:
        """Copy the arrays in one copy; they become int64."""
        ...


class EncodedMedia(Protocol):
    """The vectors of pictures, videos and sounds (`media/store.py`)."""

    def take(self, op: MediaVectors) -> Tensor:
        """Drop, encode and take as a plan says. Returns the vectors [V, ..], float32."""
        ...

    def hear(self, op: HeardMedia) -> None:
        """Drop, encode and write keys and values as a plan says."""
        ...


class DeviceRowTable:
    """The device's data of each row: the slots of its tokens, and the token sampled last."""

    def __init__(
        self,
        max_rows: int,
        context_length: int,
        device: torch.device,
        uploader: StepUploader | None = None,
        *,
        has_windows: bool = False,
    ) -> None:
        """`uploader` copies the arrays of a step to a GPU. `has_windows`: layers with windows have
        slots of their own."""
        self._uploader = uploader
        shape = (max_rows, context_length)
        self.slots = zeros(shape, torch.int32, device)
        self.window_slots: Tensor | None = None
        if has_windows:
            self.window_slots = zeros(shape, torch.int32, device)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._flat_slots = self.slots.view(-1)
        self.media: EncodedMedia | None = None  # for a model with an encoder
        # If steps are planned before the drafts of the previous step are compared.
        self.runs: DeviceRuns | None = None

    def beside(self) -> DeviceRowTable:
        """A table for another model that computes the same rows: it shares the slots, but has its
        own last sampled tokens."""
        table = copy(self)
        table.last_tokens = torch.zeros_like(self.last_tokens)
        return table

    def apply(self, plan: Plan) -> Inputs:
        """Write the plan's slots into the table, and make the inputs of its tokens."""
        assert plan.lens.min(initial=1) > 0, "a request without tokens"
        assert int(plan.lens.sum()) == plan.num_tokens == len(plan.slots), (
            "lens, tokens and slots disagree"
        )
        self.write(plan)
        rows, positions, ends = tokens_of(plan.rows, plan.starts, plan.lens)
        here = self.where(rows, positions)
        before, sampling_rows = before_sampled(plan, ends)
        columns: tuple[IntArray | LongArray, ...] = (
            plan.tokens,
            positions,
            plan.slots,
            here,
            rows,
            before,
            sampling_rows,
        )
        if self.runs is not None and has_runs(plan):
            columns = (*columns, *run_columns(plan))
        # All columns go to the device in one copy, because each copy costs as much as a small
        # kernel.
        layout = None
        draws = None
        if self._uploader is None:
            there: Sequence[Tensor] = self._to_device(*columns)
        else:
            there, layout, draws = self._uploader.upload(columns, plan)
        planned, places, slots, where, of_row, last, rows_there = there[:NUM_COLUMNS]
        self._flat_slots.index_copy_(0, where, slots.int())
        tokens = planned
        # A token of a step whose result has not been read yet is known only here.
        if plan.tokens.min(initial=0) <= LAST_SAMPLED:
            tokens = self.with_sampled(planned, of_row)
        runs, last, draws = self.begin_runs(there[NUM_COLUMNS:], last, draws)
        last_tokens = tokens.take(last)
        vectors = None
        if plan.inputs:
            tokens, vectors = self._with_inputs(tokens, plan.inputs)
        batch = AttentionBatch(
            rows=plan.rows,
            starts=plan.starts,
            lens=plan.lens,
            positions=places,
            slots=slots,
            table=self.slots,
            layout=layout,
            rotation=self._rotation(plan),
            sees_to=_sees_to(plan, positions),
        )
        if plan.window is not None:
            batch = replace(batch, window=self._windows(plan.window, here))
        return Inputs(
            tokens=tokens,
            positions=places,
            batch=batch,
            last=last,
            sampling_rows=rows_there,
            last_tokens=last_tokens,
            vectors=vectors,
            draws=draws,
            runs=runs,
        )

    def with_sampled(self, planned: Tensor, of_row: Tensor) -> Tensor:
        """The tokens [T] of a step of the rows `of_row` [T], with those that only the device may
        know."""
        sampled = self.last_tokens.take(of_row)
        tokens = torch.where(planned == LAST_SAMPLED, sampled, planned)
        return tokens if self.runs is None else self.runs.tokens(tokens, of_row)

    def begin_runs(
        self, columns: Sequence[Tensor], last: Tensor, draws: UploadedSampling | None
    ) -> tuple[StepRuns | None, Tensor, UploadedSampling | None]:
        """The runs of a step with these `run_columns`, if any, the tokens `last` [S] after which it
        samples, and how it samples."""
        if not columns:
            return None, last, draws
        assert self.runs is not None, "nothing is kept of runs"
        runs = StepRuns(*columns)
        return runs, *self.runs.begin(runs, last, draws)

    def keep_sampled(self, inputs: Inputs, sampled: Tensor) -> None:
        """Keep the tokens [S] that a step has sampled: the next step may be launched before the
        scheduler knows them."""
        self.last_tokens.index_copy_(0, inputs.sampling_rows, sampled)
        if inputs.runs is not None and self.runs is not None:
            self.runs.settle(inputs.runs, inputs.tokens, sampled, self.last_tokens)

    def _with_inputs(
        self, tokens: Tensor, inputs: Sequence[InputOp]
    ) -> tuple[Tensor, Tensor | None]:
        """Replace the tokens that have a vector by the index of the vector, and write what rows
        attend to."""
        places: list[IntArray] = []
        found: list[Tensor] = []
        for op in inputs:
            match op:
                case InputVectors(index, rows):
                    # A copy, because the rows may be in read-only memory.
                    own = torch.from_numpy(np.array(rows, dtype=np.float32))
                    found.append(own.to(tokens.device))
                case MediaVectors(index=index):
                    assert self.media is not None, "the model has no encoder"
                    found.append(self.media.take(op))
                case HeardMedia():
                    assert self.media is not None, "the model has no encoder"
                    self.media.hear(op)
                    continue
                case _:
                    raise AssertionError("an input that this runner does not know")
            places.append(index)
        if not found:
            return tokens, None
        vectors = concatenated(found)
        # Vector 0 is token -1, vector 1 is token -2: no id of a vocabulary is below 0.
        stand_ins = -1 - np.arange(len(vectors), dtype=np.int64)
        index_there, stand_ins_there = self._to_device(np.concatenate(places), stand_ins)
        return tokens.index_copy(0, index_there, stand_ins_there), vectors

    def _rotation(self, plan: Plan) -> IntArray | None:
        if plan.rotation is None:
            return None
        rotation = np.ascontiguousarray(plan.rotation, dtype=np.int32)
        assert rotation.shape == (3, plan.num_tokens), "three positions for each token"
        assert rotation.min(initial=0) >= 0, "a rotation below 0"
        assert rotation.max(initial=0) < self.slots.shape[1], "a rotation beyond the context length"
        return rotation

    def write(self, plan: Plan) -> None:
        """Apply the changes of the tables that do not follow from a plan's own slots."""
        if plan.table is not None:
            self._write(self._flat_slots, plan.table)
        if plan.window is not None and plan.window.table is not None:
            self._write(self._flat_window_slots, plan.window.table)

    @property
    def _flat_window_slots(self) -> Tensor:
        assert self.window_slots is not None, "the layers share one pool of slots"
        return self.window_slots.view(-1)

    def _windows(self, window: WindowSlots, where: LongArray) -> WindowBatch:
        """Write a step's slots of layers with windows into their table, at these indices."""
        slots, places = self._to_device(window.slots, where)
        table = self._flat_window_slots
        table.index_copy_(0, places, slots.int())
        return WindowBatch(slots, table.view(self.slots.shape))

    def _write(self, table: Tensor, writes: TableWrites) -> None:
        """Change a table. Of two writes to the same index the later one counts: a scatter has no
        order, so earlier ones are left out."""
        rows, columns, _ = tokens_of(writes.rows, writes.starts, writes.lens)
        where = self.where(rows, columns)
        slots = writes.slots
        num_rows = len(set(writes.rows.tolist()))
        if num_rows < len(writes.rows):
            # `unique` finds the first of equal values: in reversed order, that is the last one.
            _, from_end = np.unique(where[::-1], return_index=True)
            keep = len(where) - 1 - from_end
            where = where[keep]
            slots = slots[keep]
        index, values = self._to_device(where, slots)
        table.index_copy_(0, index, values.int())

    def where(self, rows: IntArray, columns: IntArray | LongArray) -> LongArray:
        """Indices in the flattened table."""
        max_rows, context_length = self.slots.shape
        assert rows.max(initial=0) < max_rows, "a row beyond the table"
        assert columns.max(initial=0) < context_length, "a token beyond the context length"
        return rows.astype(np.int64) * context_length + columns

    def _to_device(self, *arrays: IntArray | LongArray) -> Sequence[Tensor]:
        """The arrays on the device as int64, in one transfer."""
        if self._uploader is not None:
            return self._uploader.to_device(arrays)
        packed = np.concatenate(arrays, dtype=np.int64)
        there = torch.from_numpy(packed).to(self.slots.device)
        lens = [len(array) for array in arrays]
        return there.split_with_sizes(lens)


def _sees_to(plan: Plan, positions: IntArray) -> IntArray | None:
    """The plan may leave out tokens that see up to themselves; the result has all tokens."""
    if plan.sees_to is None:
        return None
    assert len(plan.sees_to) == plan.num_tokens, "one position for each token"
    sees_to = np.maximum(plan.sees_to, positions + 1).astype(np.int32)
    ends = np.repeat(plan.starts + plan.lens, plan.lens)
    assert (sees_to <= ends).all(), "a token sees another that is not computed yet"
    return sees_to


def tokens_of(
    rows: IntArray, starts: IntArray, lens: IntArray
) -> tuple[IntArray, IntArray, LongArray]:
    """Row and position of each token, and the end of each request's tokens."""
    # A decode step, the most frequent kind, repeats nothing.
    if (lens == 1).all():
        return rows, starts, np.arange(1, len(lens) + 1)
    ends = np.cumsum(lens, dtype=np.int64)
    return np.repeat(rows, lens), consecutive(starts, lens), ends


def before_sampled(plan: Plan, ends: LongArray) -> tuple[LongArray, IntArray]:
    """Index in the step of each token after which one is sampled [S], and their rows [S].

    `ends` [R]: end of each request's tokens.
    """
    if plan.drafts is None:
        return ends[plan.samples] - 1, plan.rows[plan.samples]
    counts = plan.num_sampled.astype(np.int64)
    places: LongArray = consecutive(ends - counts, counts)
    return places, np.repeat(plan.rows, counts)


def concatenated(vectors: Sequence[Tensor]) -> Tensor:
    """The vectors [n, width] one after the other, as wide as the widest: [sum of n, width].

    An encoder may also add to later layers, in further numbers of its vectors; narrower vectors end
    in zeros, and so add nothing there.
    """
    if len(vectors) == 1:
        return vectors[0]
    width = max(one.shape[1] for one in vectors)
    return torch.cat([F.pad(one, (0, width - one.shape[1])) for one in vectors])
