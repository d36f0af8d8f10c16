"""Steps that compute some layers of a prefill, and keep what these give on the device until the
next piece.

A piece is computed by the functions that compute whole steps, over the same tokens: so its bits are
those of a prefill in one step. It knows no device and no request.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.executor.assembly import RunnerSpec
from weft.executor.backend import AttentionBackend
from weft.executor.device import DeviceOutput
from weft.executor.experts.recorder import ExpertRecorder, recorded
from weft.executor.inputs import DeviceRowTable
from weft.executor.runner import DecoderOutput, DecoderSteps, ModelSteps
from weft.models.registry import DecoderModel, LayeredModel
from weft.ops.sampling import on
from weft.plan.step import LayerSpan, Plan


class SplitSteps:
    """The `ModelSteps` of a model whose prefills may come in pieces."""

    def __init__(self, pieces: ModelSteps, otherwise: ModelSteps) -> None:
        self._pieces = pieces
        self._otherwise = otherwise

    def run(self, plan: Plan) -> DeviceOutput:
        if plan.layers is None:
            return self._otherwise.run(plan)
        return self._pieces.run(plan)


class PieceSteps:
    """The pieces. `whole` ends the last one of each prefill."""

    def __init__(
        self,
        whole: DecoderSteps,
        *,
        model: LayeredModel,
        attention: AttentionBackend,
        rows: DeviceRowTable,
    ) -> None:
        self._whole = whole
        self._model = model
        self._attention = attention
        self._rows = rows
        # [T, hidden] what the layers of the open prefill have left of its tokens.
        self._carried: Tensor | None = None

    @torch.inference_mode()
    def run(self, plan: Plan) -> DecoderOutput:
        span = plan.layers
        assert span is not None, "a piece has layers"
        carried = self._take(span)
        inputs = self._rows.apply(plan)
        self._attention.prepare(inputs.batch)
        hidden = self._model.run_layers(
            span.first,
            span.last,
            carried,
            inputs.tokens,
            inputs.positions,
            self._attention,
            inputs.vectors,
        )
        if span.is_last:
            return self._whole.finish(plan, inputs, hidden)
        # A copy: the steps between the pieces use the same memory.
        self._carried = hidden.clone()
        return DecoderOutput(None, ())

    def _take(self, span: LayerSpan) -> Tensor | None:
        """The hidden states that the previous piece left for the tokens of this one."""
        carried = self._carried
        # It is needed once; and that of a prefill that was given up, never.
        self._carried = None
        if span.is_first:
            return None
        assert carried is not None, "the piece before has not been computed"
        if span.kept is None:
            return carried
        return carried.index_select(0, on(carried, span.kept))


def split(
    spec: RunnerSpec,
    otherwise: ModelSteps,
    whole: DecoderSteps,
    *,
    model: DecoderModel,
    attention: AttentionBackend,
    rows: DeviceRowTable,
    experts: ExpertRecorder | None,
) -> ModelSteps:
    """Steps that are pieces of prefills if the settings ask for them, and `otherwise`."""
    if not spec.engine.split_prefill_layers:
        return otherwise
    # `resolve` has refused all models that are not.
    layered = cast(LayeredModel, model)
    pieces = PieceSteps(whole, model=layered, attention=attention, rows=rows)
    return SplitSteps(recorded(pieces, experts), otherwise)
