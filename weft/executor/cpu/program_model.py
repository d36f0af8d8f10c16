"""Models that run as recorded programs: the forward pass is Python once, and one call at every
step.

A program is recorded for a number of tokens. A step with more tokens records it anew, for at least
twice as many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.encoder_attention import CppBidirectional
from weft.models.layers.attention import PagedAttention
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.weight import Weights
from weft.models.registry import DecoderModel, EncoderModel
from weft.ops.cpp.abi import StepArgs
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program

FIRST_CAPACITY = 64  # tokens of the first program


class SizedProgram:
    """A program with room for `capacity` rows, its input and its output."""

    def __init__(
        self,
        program: Program,
        capacity: int,
        input: Tensor,
        output: Tensor,
    ) -> None:
        self.program = program
        self.capacity = capacity
        self.input = input
        self.output = output

    def run(self, library: Library, rows: Tensor) -> Tensor:
        """Run it on `rows`. The output is good until the next run."""
        self.input[: len(rows)].copy_(rows)
        self.program.run(library, StepArgs(num_tokens=len(rows)))
        return self.output[: len(rows)]


class ProgramModel:
    """The `DecoderModel` of the CPU kernels around one that is written against `Ops`."""

    def __init__(
        self,
        model: DecoderModel,
        ops: CppOps,
        attention: CppPaged,
        hidden_size: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._attention = attention
        # Made once: a step asks for both programs, and finds them recorded.
        self._record_norm = partial(record_behind, ops, model.normed, hidden_size)
        self._record_head = partial(record_behind, ops, model.logits, hidden_size)
        self._body: SizedProgram | None = None
        self._norm: SizedProgram | None = None
        self._head: SizedProgram | None = None

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
        step.num_tokens = len(tokens)
        step.tokens = tokens.data_ptr()
        step.vectors = None if vectors is None else vectors.data_ptr()
        body.program.run(self._ops.library, step)
        return body.output[: len(tokens)]

    def normed(self, hidden: Tensor) -> Tensor:
        self._norm = with_room(self._norm, len(hidden), self._record_norm)
        return self._norm.run(self._ops.library, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head_for(len(hidden)).run(self._ops.library, hidden)

    def weights(self) -> Weights:
        return self._model.weights()

    def body_for(self, num_tokens: int) -> SizedProgram:
        """The program from tokens to hidden states. It reads nothing but its step."""
        self._body = with_room(self._body, num_tokens, self._record_body)
        return self._body

    def head_for(self, num_rows: int) -> SizedProgram:
        """The program from hidden states to logits."""
        self._head = with_room(self._head, num_rows, self._record_head)
        return self._head

    def _record_body(self, capacity: int) -> SizedProgram:
        self._ops.begin(capacity)
        # A program takes tokens and positions from its step.
        nothing = torch.empty(0, dtype=torch.int64)
        output = self._model.forward(nothing, nothing, self._attention)
        return SizedProgram(
            self._ops.finish(),
            capacity,
            nothing,
            output,
        )


class ProgramEncoder:
    """The `EncoderModel` of the CPU kernels around one that is written against `EncoderOps`."""

    def __init__(
        self, model: EncoderModel, ops: CppEncoderOps, attention: CppBidirectional
    ) -> None:
        self._model = model
        self._ops = ops
        self._attention = attention
        self._body: SizedProgram | None = None  # its input: the kinds of segments
        self._head: SizedProgram | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: BidirectionalAttention,
    ) -> Tensor:
        assert attention is self._attention, "the program was recorded with another attention"
        self._body = with_room(self._body, len(tokens), self._record_body)
        body = self._body
        body.input[: len(types)].copy_(types)
        step = self._attention.step
        step.num_tokens = len(tokens)
        step.tokens = tokens.data_ptr()
        step.positions = positions.data_ptr()
        body.program.run(self._ops.library, step)
        return body.output[: len(tokens)]

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        record = partial(record_behind, self._ops, self._model.logits, hidden.shape[1])
        self._head = with_room(self._head, len(hidden), record)
        return self._head.run(self._ops.library, hidden)

    def weights(self) -> Weights:
        return self._model.weights()

    def _record_body(self, capacity: int) -> SizedProgram:
        self._ops.begin(capacity)
        # A program takes tokens and positions from its step.
        nothing = torch.empty(0, dtype=torch.int64)
        types = torch.empty(capacity, dtype=torch.int64)
        output = self._model.forward(
            nothing,
            nothing,
            types,
            self._attention,
        )
        return SizedProgram(
            self._ops.finish(),
            capacity,
            types,
            output,
        )


def with_room(
    before: SizedProgram | None,
    num_rows: int,
    record: Callable[[int], SizedProgram],
) -> SizedProgram:
    """`before` if it has room for `num_rows`, else a program that `record` makes for more."""
    if before is None:
        return record(max(num_rows, FIRST_CAPACITY))
    if num_rows <= before.capacity:
        return before
    return record(max(num_rows, 2 * before.capacity))


def record_behind(
    ops: CppOps,
    function: Callable[[Tensor], Tensor],
    hidden_size: int,
    capacity: int,
) -> SizedProgram:
    """The program of a function of hidden states."""
    ops.begin(capacity)
    hidden = ops.recorder.buffer(hidden_size)
    output = function(hidden)
    return SizedProgram(
        ops.finish(),
        capacity,
        hidden,
        output,
    )
