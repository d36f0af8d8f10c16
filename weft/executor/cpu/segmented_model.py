"""Models with the code of transformers that run as recorded programs, with steps of torch between
them: the code was traced, and most of it was translated into calls of `Ops`.

    table, norm, product, attention, product, ..   | a program of our kernels
    an operation that only this model has          | torch
    norm, product, gate, product, ..               | a program

If all of a model's code can be translated, one program is left, and `ProgramModel` runs it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.program_model import FIRST_CAPACITY
from weft.models.layers.attention import PagedAttention
from weft.models.layers.weight import Weights
from weft.models.transformers_backend.model import TransformersModel
from weft.models.transformers_backend.translate.emit import HostStep, Values
from weft.models.transformers_backend.translate.translation import Translation
from weft.ops.cpp.abi import StepArgs
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program


class Segments:
    """Programs, and steps of torch between them, with room for `capacity` tokens. It is the `Host`
    of the recording."""

    def __init__(self, ops: CppOps, capacity: int) -> None:
        self.capacity = capacity
        self.input = torch.empty(0)
        self.output = torch.empty(0)
        self._ops = ops
        self._segments: list[Program | list[HostStep]] = []
        ops.begin(capacity)

    @property
    def has_host_steps(self) -> bool:
        return len(self._segments) > 1

    def add(self, step: HostStep) -> None:
        part = self._ops.recorder.part()
        if part.args or not self._segments:
            self._segments += [part, []]
        steps = self._segments[-1]
        assert isinstance(steps, list)
        steps.append(step)

    def buffer(self, columns: int) -> Tensor:
        return self._ops.recorder.buffer(columns)

    def finish(self, output: Tensor) -> None:
        self.output = output
        self._segments.append(self._ops.finish())

    def run(self, step: StepArgs, values: Values) -> Tensor:
        """The output for the tokens of the step, valid until the next run."""
        num_tokens: int = step.num_tokens
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.run(self._ops.library, step)
                continue
            for host_step in segment:
                host_step(values, num_tokens)
        return self.output[:num_tokens]


class SegmentedModel:
    """The `DecoderModel` of a translation."""

    def __init__(
        self,
        model: TransformersModel,
        translation: Translation,
        ops: CppOps,
        attention: CppPaged,
        hidden_size: int,
    ) -> None:
        self._model = model
        self._translation = translation
        self._ops = ops
        self._attention = attention
        self._hidden_size = hidden_size
        self._body: Segments | None = None
        self._head: Segments | None = None

    @property
    def is_unsplit(self) -> bool:
        """Whether our kernels compute the whole model. Call it after the weights have been filled,
        because they may move before."""
        segments = (self._record_body(1), self._record_head(1))
        return not any(each.has_host_steps for each in segments)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        assert attention is self._attention, "the programs were recorded with another attention"
        self._body = _with_room(self._body, len(tokens), self._record_body)
        step = self._attention.step
        step.num_tokens = len(tokens)
        step.tokens = tokens.data_ptr()
        step.vectors = None
        if vectors is not None:
            step.vectors = vectors.data_ptr()
            step.vectors_stride = vectors.stride(0)
        return self._body.run(step, self._translation.body_values(tokens, positions))

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            hidden = hidden[places]
        head = _with_room(self._head, len(hidden), self._record_head)
        self._head = head
        head.input[: len(hidden)].copy_(hidden)
        return head.run(StepArgs(num_tokens=len(hidden)), self._translation.head_values())

    def weights(self) -> Weights:
        return self._model.weights()

    def _record_body(self, capacity: int) -> Segments:
        segments = Segments(self._ops, capacity)
        segments.finish(
            self._translation.say_body(self._model.matrices, self._ops, self._attention, segments)
        )
        return segments

    def _record_head(self, capacity: int) -> Segments:
        segments = Segments(self._ops, capacity)
        segments.input = segments.buffer(self._hidden_size)
        segments.finish(
            self._translation.say_head(segments.input, self._model.matrices, self._ops, segments)
        )
        return segments


def _with_room(
    recorded: Segments | None, num_rows: int, record: Callable[[int], Segments]
) -> Segments:
    """The given segments if they have room for `num_rows`, or larger new ones."""
    if recorded is not None and num_rows <= recorded.capacity:
        return recorded
    capacity = FIRST_CAPACITY if recorded is None else 2 * recorded.capacity
    return record(max(num_rows, capacity))


class UnsplitModel:
    """The `DecoderModel` that `ProgramModel` records: a translation without steps of torch."""

    def __init__(self, model: TransformersModel, translation: Translation, ops: CppOps) -> None:
        self._model = model
        self._translation = translation
        self._ops = ops

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        return self._translation.say_body(self._model.matrices, self._ops, attention, _NoHost())

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        assert places is None, "a head is recorded for rows that are chosen already"
        return self._translation.say_head(hidden, self._model.matrices, self._ops, _NoHost())

    def weights(self) -> Weights:
        return self._model.weights()


class _NoHost:
    """The `Host` of a model without steps of torch."""

    def add(self, step: HostStep) -> None:
        raise AssertionError("torch would have to compute a part of this model")

    def buffer(self, columns: int) -> Tensor:
        raise AssertionError("torch would have to compute a part of this model")
