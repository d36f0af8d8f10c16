"""A model that runs as a recorded program: its forward pass is Python once, and one call at every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from weft.executor.cpu.attention import CppPaged
from weft.models.layers.attention import PagedAttention
from weft.models.layers.weight import Weights
from weft.models.registry import Model
from weft.ops.cpp.abi import Step
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program

FIRST_CAPACITY = 64  # tokens that the first program is recorded for; each later one has room for at least twice as many


class RecordedModel:
    """The `Model` of the CPU kernels around one that is written against `Ops`."""

    def __init__(self, model: Model, ops: CppOps, attention: CppPaged, hidden_size: int) -> None:
        self._model, self._ops, self._attention, self._hidden_size = (
            model,
            ops,
            attention,
            hidden_size,
        )
        self._body: Recorded | None = None
        self._norm: Recorded | None = None
        self._head: Recorded | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        assert attention is self._attention, "the program was recorded with another attention"
        body = self.body_for(len(tokens))
        step = self._attention.step
        step.num_tokens, step.tokens = len(tokens), tokens.data_ptr()
        step.vectors = None if vectors is None else vectors.data_ptr()
        body.program.run(self._ops.library, step)
        return body.output[: len(tokens)]

    def normed(self, hidden: Tensor) -> Tensor:
        self._norm = with_room(
            self._norm, len(hidden), partial(self._record_behind, self._model.normed)
        )
        return self._norm.run(self._ops.library, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head_for(len(hidden)).run(self._ops.library, hidden)

    def weights(self) -> Weights:
        return self._model.weights()

    def body_for(self, num_tokens: int) -> Recorded:
        """From tokens to hidden states. It reads nothing but its step."""
        self._body = with_room(self._body, num_tokens, self._record_body)
        return self._body

    def head_for(self, num_rows: int) -> Recorded:
        """From hidden states to logits."""
        self._head = with_room(
            self._head, num_rows, partial(self._record_behind, self._model.logits)
        )
        return self._head

    def _record_body(self, capacity: int) -> Recorded:
        self._ops.begin(capacity)
        nothing = torch.empty(
            0, dtype=torch.int64
        )  # a program takes tokens and positions from its step
        output = self._model.forward(nothing, nothing, self._attention)
        return Recorded(self._ops.finish(), capacity, nothing, output)

    def _record_behind(self, function: Callable[[Tensor], Tensor], capacity: int) -> Recorded:
        return record_behind(self._ops, function, self._hidden_size, capacity)


class Recorded:
    """A program with room for `capacity` rows, what it reads and what it writes."""

    def __init__(self, program: Program, capacity: int, input: Tensor, output: Tensor) -> None:
        self.program, self.capacity, self.input, self.output = program, capacity, input, output

    def run(self, library: Library, rows: Tensor) -> Tensor:
        """Run it on `rows`; good until the next run."""
        self.input[: len(rows)].copy_(rows)
        self.program.run(library, Step(num_tokens=len(rows)))
        return self.output[: len(rows)]


def with_room(
    before: Recorded | None, num_rows: int, record: Callable[[int], Recorded]
) -> Recorded:
    """`before` if it has room for so many rows, else what `record` makes of a capacity."""
    if before is not None and num_rows <= before.capacity:
        return before
    return record(max(num_rows, FIRST_CAPACITY if before is None else 2 * before.capacity))


def record_behind(
    ops: CppOps, function: Callable[[Tensor], Tensor], hidden_size: int, capacity: int
) -> Recorded:
    """A function of hidden states."""
    ops.begin(capacity)
    hidden = ops.recorder.buffer(hidden_size)
    output = function(hidden)
    return Recorded(ops.finish(), capacity, hidden, output)
