"""An encoder that runs as a recorded program."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from weft.executor.cpu.encoder_attention import CppWhole
from weft.executor.cpu.program_model import Recorded, record_behind, with_room
from weft.models.layers.encoder import WholeAttention
from weft.models.layers.weight import Weights
from weft.models.registry import Encoder
from weft.ops.cpp.encoder import CppEncoderOps


class RecordedEncoder:
    """The `Encoder` of the CPU kernels around one that is written against `EncoderOps`."""

    def __init__(self, model: Encoder, ops: CppEncoderOps, attention: CppWhole) -> None:
        self._model, self._ops, self._attention = model, ops, attention
        self._body: Recorded | None = None  # its input: the kinds of segments
        self._head: Recorded | None = None

    def forward(
        self, tokens: Tensor, positions: Tensor, types: Tensor, attention: WholeAttention
    ) -> Tensor:
        assert attention is self._attention, "the program was recorded with another attention"
        self._body = with_room(self._body, len(tokens), self._record_body)
        body, step = self._body, self._attention.step
        body.input[: len(types)].copy_(types)
        step.num_tokens, step.tokens, step.positions = (
            len(tokens),
            tokens.data_ptr(),
            positions.data_ptr(),
        )
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

    def _record_body(self, capacity: int) -> Recorded:
        self._ops.begin(capacity)
        nothing = torch.empty(
            0, dtype=torch.int64
        )  # a program takes tokens and positions from its step
        types = torch.empty(capacity, dtype=torch.int64)
        output = self._model.forward(nothing, nothing, types, self._attention)
        return Recorded(self._ops.finish(), capacity, types, output)
