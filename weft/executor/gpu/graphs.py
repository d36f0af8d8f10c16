"""Steps as CUDA graphs: Python and torch launch about 300 kernels once for each size of step, and
later steps replay them with one call.

A graph has fixed addresses, grids and sizes. So each is captured for a number of tokens and
requests, and reads its numbers from fixed memory, to which the step is copied. A smaller step is
padded:

    tokens   | t t t 0 0 |      rows | r r r d d |      slots | s s s -1 -1 |

The padding row d is the last row of the table, which no request has; attention skips requests
without cached tokens, and stores nothing for slot -1. There are graphs for decode steps, by number
of requests, and for short prompts and mixed steps, by number of tokens. A graph covers everything
from the row table to the last layer. Head and sampler are not in it: every graph would keep logits
of its own (a gigabyte for 19 sizes and 150 thousand tokens), and their few launches are hidden
after the graph that runs meanwhile.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.executor.backend import AttentionBatch, DeviceLayout, StepSize, WindowBatch
from weft.executor.gpu.gpu import Gpu, GpuGraph
from weft.executor.gpu.layout import (
    GpuAttentionBackend,
    StateLayout,
    StepLayout,
    lay_out_states,
)
from weft.executor.gpu.staging import (
    GpuUploader,
    as_indices,
    draw_columns,
    offsets,
    placed,
    split,
)
from weft.executor.inputs import DeviceRowTable, Inputs, before_sampled, tokens_of
from weft.executor.overlap.runs import run_columns
from weft.models.registry import DecoderModel
from weft.plan.runs import has_runs
from weft.plan.step import Plan, StateSlots

if TYPE_CHECKING:
    from weft.executor.gpu.states import TritonStates

NONE = np.empty(0, np.int32)
# Arrays of a step before those of attention: tokens, indices in the row table, rows.
NUM_COLUMNS = 3
# Arrays of R numbers that `StepGraph.run` also sends: last tokens, sampling rows and the four
# columns of draws; the keys of draws are two numbers for each request.
NUM_TAIL_COLUMNS = 6
NUM_RUN_COLUMNS = 6  # of `run_columns`; the keys are two numbers for each token
PROMPT_REQUESTS = 32  # in a step that is captured by tokens


class GraphParts(NamedTuple):
    """The objects that graphs use. `rows` has one more row than requests may run."""

    model: DecoderModel
    attention: GpuAttentionBackend
    rows: DeviceRowTable
    uploader: GpuUploader
    states: TritonStates | None = None  # of the layers that keep one


class StepGraphs:
    """The graphs of a model: each step uses the smallest one that is large enough.

    `decodes` are numbers of requests with one token each, `prompts` numbers of tokens of other
    steps.
    """

    def __init__(
        self,
        gpu: Gpu,
        parts: GraphParts,
        decodes: Sequence[int],
        prompts: Sequence[int],
    ) -> None:
        self._gpu = gpu
        self._parts = parts
        self._decode_sizes = sorted(decodes)
        self._prompt_sizes = sorted(prompts)
        self._decodes: list[StepGraph] = []
        self._prompts: list[StepGraph] = []

    @torch.inference_mode()
    def capture(self) -> None:
        """Run each size once, which compiles its kernels, and capture it; the largest first,
        because the others share its memory."""
        tiling = self._parts.attention.tiling
        for num_requests in self._decode_sizes:
            size = tiling.decode_size(num_requests)
            self._decodes.append(StepGraph(self._parts, size))
        for num_tokens in self._prompt_sizes:
            size = tiling.extend_size(num_tokens, min(num_tokens, PROMPT_REQUESTS))
            self._prompts.append(StepGraph(self._parts, size))
        graphs = [*self._decodes, *self._prompts]
        graphs.sort(key=lambda graph: graph.size.num_tokens, reverse=True)
        num_ints = max((graph.num_ints for graph in graphs), default=0)
        with self._gpu.stream(), _no_garbage():
            numbers = torch.zeros(
                num_ints,
                dtype=torch.int32,
                device=self._gpu.device,
            )
            for graph in graphs:
                graph.capture(self._gpu, numbers)
            self._gpu.synchronize()

    def fitting(self, plan: Plan) -> StepGraph | None:
        """The graph for a step; None if the step must run without a graph."""
        num_requests = len(plan.rows)
        # Captured launches use the positions in the sequence, and no token sees later ones.
        is_usual = plan.rotation is None and plan.sees_to is None
        if not num_requests or plan.inputs or not is_usual:
            return None
        if num_requests == plan.num_tokens:
            index = bisect_left(self._decode_sizes, num_requests)
            return self._decodes[index] if index < len(self._decodes) else None
        index = bisect_left(self._prompt_sizes, plan.num_tokens)
        if index == len(self._prompts) or num_requests > PROMPT_REQUESTS:
            return None
        return self._prompts[index]


class AdapterGraphs:
    """The graphs of a model whose requests may have adapters. Steps without adapters have a graph
    without additional launches."""

    def __init__(self, plain: StepGraphs, with_adapters: StepGraphs) -> None:
        self._plain = plain
        self._with_adapters = with_adapters

    def fitting(self, plan: Plan) -> StepGraph | None:
        graphs = self._plain if plan.adapters is None else self._with_adapters
        return graphs.fitting(plan)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disables garbage collection inside: freeing pinned memory or graphs during a capture would
    invalidate the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraph:
    """The graph for steps of up to `size`."""

    def __init__(self, parts: GraphParts, size: StepSize) -> None:
        self.size = size
        self._model = parts.model
        self._attention = parts.attention
        self._rows = parts.rows
        self._uploader = parts.uploader
        self._states = parts.states
        self._padding_row = len(self._rows.slots) - 1
        self._lens = [len(array) for array in self._arrays(None)]
        num_requests = size.num_requests
        if self._rows.runs is not None:
            # A step that is captured by tokens may sample after each token.
            num_requests = max(num_requests, size.num_tokens)
        num_run_columns = NUM_RUN_COLUMNS if self._rows.runs is not None else 0
        tail = [num_requests] * (NUM_TAIL_COLUMNS + num_run_columns) + [2 * num_requests]
        tail += [2 * num_requests] if num_run_columns else []
        _, self.num_ints = offsets([*self._lens, *tail])
        self._numbers = torch.empty(0)
        self._tokens = torch.empty(0)
        self._hidden = torch.empty(0)
        self._graph: GpuGraph | None = None

    def capture(self, gpu: Gpu, numbers: Tensor) -> None:
        """Run and record a step of padding. The graph reads each later step from `numbers`."""
        self._numbers = numbers
        self._uploader.send(self._arrays(None), numbers)
        self._attention.expect(NONE, NONE, self.size)
        self._body()
        self._graph, (self._tokens, self._hidden) = gpu.capture(self._body)

    def replay(self, plan: Plan) -> tuple[Inputs, Tensor]:
        """Copy a step to the memory that the graph reads, and replay the graph.

        The numbers for head and sampler are part of the same copy. Returns the inputs and the
        hidden states [size.num_tokens, hidden]; those of padding mean nothing.
        """
        assert self._graph is not None, "capture() comes first"
        self._rows.write(plan)
        last, rows = before_sampled(plan, np.cumsum(plan.lens, dtype=np.int64))
        run_arrays: tuple[IntArray | LongArray, ...] = ()
        if self._rows.runs is not None and has_runs(plan):
            run_arrays = run_columns(plan)
        # The graph reads the first arrays; head and sampler, which run after it, read the others.
        arrays = self._arrays(plan)
        arrays += [last, rows, *run_arrays, *draw_columns(plan.sampling)]
        lens = [len(array) for array in arrays]
        self._uploader.send(arrays, self._numbers)
        self._attention.expect(plan.starts, plan.lens, self.size)
        there = split(self._numbers, lens)
        num_body = len(self._lens)
        num_known = num_body + 2 + len(run_arrays)
        known = as_indices(self._numbers, lens[:num_known], skip=num_body)
        last_there, sampling_rows = known[:2]
        # The sampler's numbers are views of the same memory. They are read in stream order, before
        # the copy of the next step overwrites them.
        self._graph.replay()
        # Results of the previous step are read on the stream, so after its end, like the replay.
        draws = placed(plan.sampling, there[num_known:])
        runs, last_there, draws = self._rows.begin_runs(known[2:], last_there, draws)
        batch = self._batch(
            plan.rows,
            plan.starts,
            plan.lens,
            there[:num_body],
        )
        inputs = Inputs(
            tokens=self._tokens,
            positions=batch.positions,
            batch=batch,
            last=last_there,
            sampling_rows=sampling_rows,
            last_tokens=self._tokens.take(last_there),
            draws=draws,
            runs=runs,
        )
        return inputs, self._hidden

    def _arrays(self, plan: Plan | None) -> list[IntArray | LongArray]:
        """The padded arrays of a step: tokens, their indices in the row table, rows, those that
        attention reads, the slots of layers with windows, if these have slots of their own, and
        those that states read. Without a plan, all values are padding."""
        if plan is None:
            arrays = self._padded(
                NONE,
                NONE,
                NONE,
                NONE,
                NONE,
            )
            return [*arrays, *self._of_windows(NONE), *self._of_states(NONE, None)]
        arrays = self._padded(
            plan.rows,
            plan.starts,
            plan.lens,
            plan.tokens,
            plan.slots,
        )
        in_windows = NONE if plan.window is None else plan.window.slots
        return [
            *arrays,
            *self._of_windows(in_windows),
            *self._of_states(plan.lens, plan.states),
        ]

    def _of_windows(self, slots: IntArray) -> list[IntArray]:
        if self._rows.window_slots is None:
            return []
        return [_filled(slots, self.size.num_tokens, -1)]

    def _of_states(self, lens: IntArray, slots: StateSlots | None) -> list[IntArray]:
        if self._states is None:
            return []
        # At most one copy of a state for each token.
        num_kept = self.size.num_tokens
        return list(lay_out_states(lens, slots, self.size.num_requests, num_kept))

    def _padded(
        self,
        rows: IntArray,
        starts: IntArray,
        lens: IntArray,
        tokens: IntArray,
        slots: IntArray,
    ) -> list[IntArray | LongArray]:
        num_tokens = self.size.num_tokens
        context_length = self._rows.slots.shape[1]
        row_of, positions, _ = tokens_of(rows, starts, lens)
        where = np.full(num_tokens, self._padding_row * context_length, np.int64)
        where[: len(row_of)] = self._rows.where(row_of, positions)
        layout = self._attention.tiling.lay_out(
            rows,
            starts,
            lens,
            slots,
            self.size,
        )
        return [
            _filled(tokens, num_tokens, 0),
            where,
            _filled(row_of, num_tokens, self._padding_row),
            *layout,
        ]

    def _body(self) -> tuple[Tensor, Tensor]:
        """The captured work. It must not depend on a number that only the host has."""
        tokens, where, row_of = as_indices(self._numbers, self._lens[:NUM_COLUMNS])
        there = split(self._numbers, self._lens)
        batch = self._batch(NONE, NONE, NONE, there)
        if self._states is not None:
            self._states.begin(there[-len(StateLayout._fields) :])
        self._rows.slots.view(-1).index_copy_(0, where, batch.slots)
        if batch.window is not None:
            batch.window.table.view(-1).index_copy_(0, where, batch.window.slots)
        tokens = self._rows.with_sampled(tokens, row_of)
        self._attention.prepare(batch)
        return tokens, self._model.forward(tokens, batch.positions, self._attention)

    def _batch(
        self,
        rows: IntArray,
        starts: IntArray,
        lens: IntArray,
        there: Sequence[Tensor],
    ) -> AttentionBatch:
        """The batch of a step whose arrays (`_arrays`) are on the device."""
        end = NUM_COLUMNS + len(StepLayout._fields)
        layout = there[NUM_COLUMNS:end]
        positions, slots = layout[-2:]
        window = None
        if self._rows.window_slots is not None:
            window = WindowBatch(there[end], self._rows.window_slots)
        return AttentionBatch(
            rows=rows,
            starts=starts,
            lens=lens,
            positions=positions,
            slots=slots,
            table=self._rows.slots,
            layout=DeviceLayout(tuple(layout), self.size),
            window=window,
        )


def _filled(
    values: IntArray,
    size: int,
    filling: int,
) -> IntArray:
    """The values, padded to `size`."""
    filled = np.full(size, filling, np.int32)
    filled[: len(values)] = values
    return filled
