"""Steps that compute some layers of a prefill, called a piece, and keep the hidden states on the
device until the next piece.

Pieces use the functions that compute whole steps, on the same tokens. So the result has the same
bits as a prefill in one step. Knows no device and no request.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.config.engine import EngineConfig
from weft.executor.backend import AttentionBackend
from weft.executor.device import DeviceOutput
from weft.executor.inputs import DeviceRowTable
from weft.executor.passes.experts import ExpertRecorder
from weft.executor.runner import DecoderOutput, DecoderSteps, Pass, Run
from weft.models.registry import DecoderModel, LayeredModel
from weft.ops.sampling import on
from weft.plan.step import LayerSpan, Plan


class SplitPass(Pass):
    """Lets `pieces` compute the plans that are pieces of a prefill. `experts`: what counts the
    experts of steps, if the model has some."""

    name = "split"

    def __init__(self, pieces: PieceSteps, experts: ExpertRecorder | None) -> None:
        self._pieces = pieces
        self._experts = experts

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.layers is None:
            return then(plan)
        output = self._pieces.compute(plan)
        if self._experts is not None and self._experts.is_on:
            self._experts.count(plan)
        return output


class PieceSteps:
    """Computes pieces. `unsplit` computes the end of the last piece of a prefill: head and
    sampling."""

    def __init__(
        self,
        unsplit: DecoderSteps,
        *,
        model: LayeredModel,
        attention: AttentionBackend,
        rows: DeviceRowTable,
    ) -> None:
        self._unsplit = unsplit
        self._model = model
        self._attention = attention
        self._rows = rows
        # [T, hidden] the hidden states of the unfinished prefill after its last piece.
        self._carried: Tensor | None = None

    @torch.inference_mode()
    def compute(self, plan: Plan) -> DecoderOutput:
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
            return self._unsplit.finish(plan, inputs, hidden)
        # A copy, because steps between the pieces overwrite the memory.
        self._carried = hidden.clone()
        return DecoderOutput(None, ())

    def _take(self, span: LayerSpan) -> Tensor | None:
        """The hidden states of the previous piece, for the tokens of this one; None for the first
        piece."""
        carried = self._carried
        # Each is used once. Those of an aborted prefill are never used.
        self._carried = None
        if span.is_first:
            return None
        assert carried is not None, "the piece before has not been computed"
        if span.kept is None:
            return carried
        return carried.index_select(0, on(carried, span.kept))


def split(
    config: EngineConfig,
    unsplit: DecoderSteps,
    *,
    model: DecoderModel,
    attention: AttentionBackend,
    rows: DeviceRowTable,
    experts: ExpertRecorder | None,
) -> list[Pass]:
    """The pass for pieces, if the settings ask for pieces."""
    if not config.split_prefill_layers:
        return []
    # `resolve` has refused models that are not layered.
    layered = cast(LayeredModel, model)
    pieces = PieceSteps(unsplit, model=layered, attention=attention, rows=rows)
    return [SplitPass(pieces, experts)]
