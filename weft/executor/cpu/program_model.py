"""Models that run as recorded programs: the Python of the forward pass runs once, and each step is
one call.

A program is recorded for a number of tokens. For a step with more tokens it is recorded again, for
at least twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.encoder_attention import CppBidirectional
from weft.models.layers.attention import PagedAttention
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.layers.weight import Weights
from weft.models.registry import DecoderModel, EncoderModel, LayeredModel
from weft.ops.cpp.abi import StepArgs
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program

FIRST_CAPACITY = 64  # tokens of the first program


class LayerOps(NamedTuple):
    """The end of a layer in a program."""

    end: int  # index after its operations
    output: Tensor  # [capacity, hidden]


class SizedProgram:
    """A program with room for `capacity` rows, its input and its output."""

    def __init__(
        self,
        program: Program,
        capacity: int,
        input: Tensor,
        output: Tensor,
        layers: Sequence[LayerOps] = (),
    ) -> None:
        self.program = program
        self.capacity = capacity
        self.input = input
        self.output = output
        self.layers = layers  # of the model's body

    def run(self, library: Library, rows: Tensor, step: StepArgs | None = None) -> Tensor:
        """Run the program on `rows`; `step` has further arguments. The output is valid until the
        next run."""
        self.input[: len(rows)].copy_(rows)
        step = step or StepArgs()
        step.num_tokens = len(rows)
        self.program.run(library, step)
        return self.output[: len(rows)]


class GrowingProgram:
    """The program of one function. It can grow: `record` makes one with room for a number of
    rows."""

    def __init__(self, record: Callable[[int], SizedProgram]) -> None:
        self._record = record
        self._recorded: SizedProgram | None = None

    def for_rows(self, num_rows: int) -> SizedProgram:
        """A program with room for `num_rows`."""
        before = self._recorded
        if before is not None and num_rows <= before.capacity:
            return before
        # Doubling bounds the number of recordings by the logarithm of the largest step.
        capacity = FIRST_CAPACITY if before is None else 2 * before.capacity
        recorded = self._record(max(num_rows, capacity))
        self._recorded = recorded
        return recorded


class ProgramModel:
    """The `LayeredModel` of the CPU kernels, which wraps a model that is written against `Ops`."""

    def __init__(
        self,
        model: DecoderModel,
        ops: CppOps,
        attention: CppPaged,
        hidden_size: int,
        num_layers: int = 0,
    ) -> None:
        """`num_layers` of a `LayeredModel`; 0: neither the model nor this wrapper is one."""
        self._model = model
        self._num_layers = num_layers
        self._ops = ops
        self._attention = attention
        # From tokens to hidden states. It reads only its step.
        self.body = GrowingProgram(self._record_body)
        # From hidden states to logits.
        self.head = GrowingProgram(partial(record_after_body, ops, model.logits, hidden_size))
        self._norm = GrowingProgram(partial(record_after_body, ops, model.normed, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        body = self._body_for(tokens, attention, vectors)
        body.program.run(self._ops.library, self._attention.step)
        return body.output[: len(tokens)]

    def run_layers(
        self,
        first: int,
        last: int,
        carried: Tensor | None,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        body = self._body_for(tokens, attention, vectors)
        begin = 0
        if carried is not None:
            before = body.layers[first - 1]
            before.output[: len(tokens)].copy_(carried)
            begin = before.end
        end, output = body.layers[last - 1]
        body.program.run_part(self._ops.library, self._attention.step, begin, end)
        return output[: len(tokens)]

    def normed(self, hidden: Tensor) -> Tensor:
        return self._norm.for_rows(len(hidden)).run(self._ops.library, hidden)

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        rows = hidden if places is None else hidden.index_select(0, places)
        step = StepArgs()
        if self._ops.adapters is not None:
            self._ops.adapters.tell(step, places)
        return self.head.for_rows(len(rows)).run(self._ops.library, rows, step)

    def weights(self) -> Weights:
        return self._model.weights()

    def _record_body(self, capacity: int) -> SizedProgram:
        self._ops.begin(capacity)
        # A program takes tokens and positions from its step.
        nothing = torch.empty(0, dtype=torch.int64)
        if not self._num_layers:
            output = self._model.forward(nothing, nothing, self._attention)
            return SizedProgram(self._ops.finish(), capacity, nothing, output)
        layers = self._record_layers(nothing)
        output = layers[-1].output
        return SizedProgram(self._ops.finish(), capacity, nothing, output, layers)

    def _record_layers(self, nothing: Tensor) -> list[LayerOps]:
        """Record one layer after the other. What stands between two is in memory of its own."""
        model = cast(LayeredModel, self._model)
        carried: Tensor | None = None
        layers: list[LayerOps] = []
        for layer in range(self._num_layers):
            carried = model.run_layers(layer, layer + 1, carried, nothing, nothing, self._attention)
            layers.append(LayerOps(self._ops.recorder.num_ops, carried))
        return layers

    def _body_for(
        self, tokens: Tensor, attention: PagedAttention, vectors: Tensor | None
    ) -> SizedProgram:
        """The program for a step of these tokens, which it will read."""
        assert attention is self._attention, "the program was recorded with another attention"
        step = self._attention.step
        step.num_tokens = len(tokens)
        step.tokens = tokens.data_ptr()
        step.vectors = None
        if vectors is not None:
            step.vectors = vectors.data_ptr()
            step.vectors_stride = vectors.stride(0)
        return self.body.for_rows(len(tokens))


class ProgramEncoder:
    """The `EncoderModel` of the CPU kernels around one that is written against `EncoderOps`."""

    def __init__(
        self,
        model: EncoderModel,
        ops: CppEncoderOps,
        attention: CppBidirectional,
        hidden_size: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._attention = attention
        self._body = GrowingProgram(self._record_body)  # its input: the kinds of segments
        self._head = GrowingProgram(partial(record_after_body, ops, model.logits, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: BidirectionalAttention,
    ) -> Tensor:
        assert attention is self._attention, "the program was recorded with another attention"
        body = self._body.for_rows(len(tokens))
        body.input[: len(types)].copy_(types)
        step = self._attention.step
        step.num_tokens = len(tokens)
        step.tokens = tokens.data_ptr()
        step.positions = positions.data_ptr()
        body.program.run(self._ops.library, step)
        return body.output[: len(tokens)]

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            hidden = hidden[places]
        return self._head.for_rows(len(hidden)).run(self._ops.library, hidden)

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


def record_after_body(
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
