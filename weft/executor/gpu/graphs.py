"""Steps as CUDA graphs: what Python and torch do to launch some 300 kernels is done once for each size of step, and
replayed with one call.

A graph has fixed addresses, grids and sizes. So each is captured for a number of tokens and requests, and reads its
numbers from one fixed place, to which the step's copy goes; a smaller step is filled up:

    tokens   | t t t 0 0 |      rows | r r r d d |      slots | s s s -1 -1 |

The row d that pads is the last one of the table and nobody's; attention skips requests without cached tokens, and
stores nothing for slot -1. There are graphs for decode steps, by requests, and for short prompts and mixed steps, by
tokens. In the graph is everything from the row table to the last layer. Head and sampler are not: every graph would
keep logits of its own (a gigabyte for 19 sizes and 150 thousand tokens), and their few launches are hidden behind the
graph that runs meanwhile.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.executor.attention_layout import Size
from weft.executor.backend import AttentionBatch, LaidOutBackend, Shipped
from weft.executor.gpu.gpu import Gpu, Graph
from weft.executor.gpu.packing import Packing, draw_columns, placed, wide
from weft.executor.gpu.staging import parts, places
from weft.executor.inputs import Inputs, RowTable, tokens_of
from weft.models.registry import Model
from weft.plan.step import LAST_SAMPLED, Plan

NONE = np.empty(0, np.int32)
NUM_COLUMNS = 3  # arrays of a step before those of attention: tokens, places in the row table, rows
PROMPT_REQUESTS = 32  # in a step that is captured by tokens


class GraphParts(NamedTuple):
    """What graphs run. `rows` has one row more than requests may run."""

    model: Model
    attention: LaidOutBackend
    rows: RowTable
    packing: Packing


class StepGraphs:
    """The graphs of a model: for each step the smallest that holds it.

    `decodes` are numbers of requests with one token each, `prompts` numbers of tokens of other steps.
    """

    def __init__(
        self, gpu: Gpu, parts: GraphParts, decodes: Sequence[int], prompts: Sequence[int]
    ) -> None:
        self._gpu, self._parts = gpu, parts
        self._decode_sizes, self._prompt_sizes = sorted(decodes), sorted(prompts)
        self._decodes: list[StepGraph] = []
        self._prompts: list[StepGraph] = []

    @torch.inference_mode()
    def capture(self) -> None:
        """Run each size once, which compiles what it needs, and capture it; the largest first, whose memory the others
        share."""
        tiling = self._parts.attention.tiling
        self._decodes = [
            StepGraph(self._parts, tiling.decode_size(num)) for num in self._decode_sizes
        ]
        self._prompts = [
            StepGraph(self._parts, tiling.extend_size(num, min(num, PROMPT_REQUESTS)))
            for num in self._prompt_sizes
        ]
        graphs = sorted(
            (*self._decodes, *self._prompts), key=lambda graph: graph.size.num_tokens, reverse=True
        )
        with self._gpu.stream(), _no_garbage():
            num_ints = max((graph.num_ints for graph in graphs), default=0)
            numbers = torch.zeros(num_ints, dtype=torch.int32, device=self._gpu.device)
            for graph in graphs:
                graph.capture(self._gpu, numbers)
            self._gpu.synchronize()

    def fitting(self, plan: Plan) -> StepGraph | None:
        """The graph for a step, if there is one."""
        num = len(plan.rows)
        if not num or plan.vectors is not None:
            return None
        if num == plan.num_tokens:
            at = bisect_left(self._decode_sizes, num)
            return self._decodes[at] if at < len(self._decodes) else None
        at = bisect_left(self._prompt_sizes, plan.num_tokens)
        return self._prompts[at] if at < len(self._prompts) and num <= PROMPT_REQUESTS else None


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Nothing is collected inside: pinned memory or graphs that are freed while a stream is captured spoil what it is
    captured into."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraph:
    """One of them, for steps of up to `size`."""

    def __init__(self, parts: GraphParts, size: Size) -> None:
        self.size = size
        self._model, self._attention, self._rows, self._packing = parts
        self._padding_row = len(self._rows.slots) - 1
        self._lens = [len(array) for array in self._arrays(None)]
        requests = size.num_requests
        self.num_ints = places([*self._lens, *[requests] * 6, 2 * requests])[
            1
        ]  # with what `run` adds
        self._numbers = self._tokens = self._hidden = torch.empty(0)
        self._graph: Graph | None = None

    def capture(self, gpu: Gpu, numbers: Tensor) -> None:
        """`numbers` is where the graph finds the step."""
        self._numbers = numbers
        self._packing.send(self._arrays(None), numbers)
        self._attention.expect(NONE, NONE, self.size)
        self._body()
        self._graph, (self._tokens, self._hidden) = gpu.capture(self._body)

    def run(self, plan: Plan) -> tuple[Inputs, Tensor]:
        """Send a step, with what is needed behind the graph, to where the graph reads it, and replay. Returns the step
        and its hidden states [size.num_tokens, hidden]; those of padding mean nothing."""
        assert self._graph is not None, "capture() comes first"
        if plan.table is not None:
            self._rows.write(plan.table)
        last = (np.cumsum(plan.lens, dtype=np.int64) - 1)[plan.samples]
        arrays = [*self._arrays(plan), last, plan.rows[plan.samples], *draw_columns(plan.sampling)]
        lens, body = [len(array) for array in arrays], len(self._lens)
        self._packing.send(arrays, self._numbers)
        self._attention.expect(plan.starts, plan.lens, self.size)
        there = parts(self._numbers, lens)
        last_there, sampling_rows = wide(self._numbers, lens[: body + 2], skip=body)
        self._graph.replay()
        layout = there[NUM_COLUMNS:body]
        inputs = Inputs(
            tokens=self._tokens,
            positions=layout[-2],
            batch=self._batch(plan.rows, plan.starts, plan.lens, layout),
            last=last_there,
            sampling_rows=sampling_rows,
            last_tokens=self._tokens.take(last_there),
            draws=placed(plan.sampling, there[body + 2 :]),
        )
        return inputs, self._hidden

    def _arrays(self, plan: Plan | None) -> list[IntArray | LongArray]:
        """A step (None: nothing but padding), filled up: tokens, their places in the row table, rows; and what
        attention reads."""
        rows, starts, lens, tokens, slots = (
            (NONE,) * 5
            if plan is None
            else (plan.rows, plan.starts, plan.lens, plan.tokens, plan.slots)
        )
        num, context_length = self.size.num_tokens, self._rows.slots.shape[1]
        row_of, positions, _ = tokens_of(rows, starts, lens)
        where = np.full(num, self._padding_row * context_length, np.int64)
        where[: len(row_of)] = self._rows.where(row_of, positions)
        layout = self._attention.tiling.lay_out(rows, starts, lens, slots, self.size)
        return [_filled(tokens, num, 0), where, _filled(row_of, num, self._padding_row), *layout]

    def _body(self) -> tuple[Tensor, Tensor]:
        """What is captured: nothing in it may depend on a number that only the host has."""
        tokens, where, row_of = wide(self._numbers, self._lens[:NUM_COLUMNS])
        layout = parts(self._numbers, self._lens)[NUM_COLUMNS:]
        positions, slots = layout[-2:]
        self._rows.slots.view(-1).index_copy_(0, where, slots)
        tokens = torch.where(tokens == LAST_SAMPLED, self._rows.last_tokens.take(row_of), tokens)
        self._attention.prepare(self._batch(NONE, NONE, NONE, layout))
        return tokens, self._model.forward(tokens, positions, self._attention)

    def _batch(
        self, rows: IntArray, starts: IntArray, lens: IntArray, layout: Sequence[Tensor]
    ) -> AttentionBatch:
        positions, slots = layout[-2:]
        shipped = Shipped(tuple(layout), self.size)
        return AttentionBatch(rows, starts, lens, positions, slots, self._rows.slots, shipped)


def _filled(values: IntArray, size: int, filling: int) -> IntArray:
    """`size` of them, the values first."""
    filled = np.full(size, filling, np.int32)
    filled[: len(values)] = values
    return filled
