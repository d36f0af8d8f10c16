"""The passes of a head in torch: the first reads what was kept of the model's steps, each later one
what the one before has made of its last tokens. `CpuFusedSteps.guess` computes all passes in one
call."""

from __future__ import annotations

import torch

from weft.executor.backend import AttentionBackend
from weft.executor.heads.states import HiddenPool
from weft.executor.inputs import DeviceRowTable
from weft.executor.outputs.sampler import sample
from weft.executor.runner import DecoderOutput
from weft.models.heads.protocol import HeadModel
from weft.ops.sampling import SamplerOps
from weft.plan.step import Plan


class HeadSteps:
    """Computes the passes of a plan for a head, one at a time (`GuessPasses`)."""

    def __init__(
        self,
        *,
        model: HeadModel,
        attention: AttentionBackend,
        sampler: SamplerOps | None,
        rows: DeviceRowTable,
        states: HiddenPool,
        dtype: torch.dtype,
    ) -> None:
        """`sampler`: None on a rank that follows, which draws nothing. `dtype` of activations."""
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._rows = rows
        self._states = states
        self._dtype = dtype

    def first(self, plan: Plan) -> DecoderOutput:
        return self._compute(plan, is_first=True)

    def later(self, plan: Plan) -> DecoderOutput:
        return self._compute(plan, is_first=False)

    @torch.inference_mode()
    def _compute(self, plan: Plan, *, is_first: bool) -> DecoderOutput:
        inputs = self._rows.apply(plan)
        batch = inputs.batch
        self._attention.prepare(batch)
        carried = self._states.carried
        if is_first:
            received = self._states.kept[batch.slots]
        else:
            rows = torch.from_numpy(batch.rows).to(carried.device)
            received = carried[rows]
        hidden = self._model.forward(
            inputs.tokens,
            inputs.positions,
            self._attention,
            received.to(self._dtype),
            is_first=is_first,
        )
        if not len(inputs.last):
            return DecoderOutput(None, ())
        carried[inputs.sampling_rows] = hidden.index_select(0, inputs.last).float()
        logits = self._model.logits(hidden, inputs.last)
        if self._sampler is None:
            return DecoderOutput(None, ())
        sampled = sample(
            self._sampler,
            logits,
            plan,
            inputs.last_tokens,
            None,
            inputs.draws,
        )
        self._rows.keep_sampled(inputs, sampled.tokens)
        return DecoderOutput(sampled, ())
