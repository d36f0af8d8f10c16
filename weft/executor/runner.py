"""Runs plans on one device: rows and slots in, tokens out. It knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, consecutive
from weft.executor.backend import AttentionBackend
from weft.executor.device import DeviceOutput, StepDevice
from weft.executor.inputs import DeviceRowTable, Inputs
from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.aux_outputs import ComputedStep, compute_aux_outputs
from weft.executor.outputs.pooling import Pooler
from weft.executor.sampler import SamplerOutput, sample
from weft.executor.weights.store import WeightStore
from weft.models.layers.encoder import BidirectionalAttention
from weft.models.registry import DecoderModel, EncoderModel
from weft.ops.cpp.library import Library
from weft.ops.sampling import SamplerOps, on
from weft.plan.device import DeviceRequest, Pending
from weft.plan.outputs import AuxOutput, PooledVectors, PoolingRequest
from weft.plan.step import Plan, Result, Step, find

T = TypeVar("T")


class DecoderOutput(NamedTuple):
    """The `DeviceOutput` of a model that generates."""

    sampled: SamplerOutput | None  # None: no request samples
    outputs: tuple[AuxOutput, ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> DecoderOutput:
        if self.sampled is None:
            return self
        return self._replace(sampled=self.sampled.moved(move))

    def result(self) -> Result:
        if self.sampled is None:
            return Result(tokens=np.empty(0, np.int32), outputs=self.outputs)
        return self.sampled.result(self.outputs)


class FusedSteps(Protocol):
    """Steps that one call computes, from the plan's numbers to the tokens."""

    def takes(self, plan: Plan) -> bool:
        """Whether `run` can compute this step."""
        ...

    def run(self, plan: Plan) -> DeviceOutput: ...


class CapturedStep(Protocol):
    """Launches that were recorded for steps of up to some size."""

    def run(self, plan: Plan) -> tuple[Inputs, Tensor]:
        """Replay them for a step. Returns its inputs and hidden states."""
        ...


class CapturedSteps(Protocol):
    def fitting(self, plan: Plan) -> CapturedStep | None:
        """The captured step that can hold this one, if there is one."""
        ...


class TorchRunner:
    """The `Runner` of a model that generates: rows and slots in, tokens out, in the order of
    launches.

    It computes with torch, or with programs and kernels behind the same seams. The arrays of a
    plan are read when the step runs: they must not change before its result is there. A step that
    raises (its `result` does) leaves its tokens without K and V; later steps are not affected.
    """

    def __init__(
        self,
        *,
        model: DecoderModel,
        attention: AttentionBackend,
        sampler: SamplerOps,
        rows: DeviceRowTable,
        store: WeightStore,
        device: StepDevice,
        graphs: CapturedSteps | None = None,
        fused_steps: FusedSteps | None = None,
        pooler: Pooler | None = None,
        processors: Processors | None = None,
        kernels: Library | None = None,
    ) -> None:
        self.kernels = kernels  # the CPU kernels, if they compute
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._rows = rows
        self._store = store
        self._device = device
        self._pooler = pooler
        self._processors = processors
        self._graphs = graphs
        self._fused_steps = fused_steps

    def launch(self, plan: Plan) -> Step:
        return self._device.launch(self._run, plan)

    def control(self, request: DeviceRequest) -> Pending:
        return self._device.run_exclusive(partial(self._store.do, request))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread that runs steps, after the launched steps, before any other."""
        return self._device.submit(work)

    def close(self) -> None:
        """Finish what is launched and end the thread."""
        self._device.close()

    def _run(self, plan: Plan) -> DeviceOutput:
        if self._fused_steps is not None and self._fused_steps.takes(plan):
            return self._fused_steps.run(plan)
        return self._compute(plan)

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> DecoderOutput:
        graph = None if self._graphs is None else self._graphs.fitting(plan)
        if graph is not None:
            inputs, hidden = graph.run(plan)
        else:
            inputs = self._rows.apply(plan)
            if plan.num_tokens:
                self._attention.prepare(inputs.batch)
                hidden = self._model.forward(
                    inputs.tokens, inputs.positions, self._attention, inputs.vectors
                )
        outputs: tuple[AuxOutput, ...] = ()
        if plan.outputs:
            step = ComputedStep(plan, hidden, self._model, self._sampler, self._pooler)
            outputs = compute_aux_outputs(step)
        if not len(inputs.last):
            return DecoderOutput(None, outputs)
        logits = self._model.logits(hidden.index_select(0, inputs.last))
        sampled = sample(
            self._sampler, logits, plan, inputs.last_tokens, self._processors, inputs.draws
        )
        self._rows.last_tokens.index_copy_(0, inputs.sampling_rows, sampled.tokens)
        return DecoderOutput(sampled, outputs)


class EncoderOutput(NamedTuple):
    """The `DeviceOutput` of a model without KV."""

    outputs: tuple[AuxOutput, ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> EncoderOutput:
        return self

    def result(self) -> Result:
        return Result(tokens=np.empty(0, np.int32), outputs=self.outputs)


class EncoderAttention(BidirectionalAttention, Protocol):
    """`BidirectionalAttention` that is planned once for all layers of a step."""

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """Plan for prompts of `lens` [R] tokens, which stand one behind the other."""
        ...


class EncoderRunner:
    """The `Runner` of a model without KV: whole prompts in, one vector for each out.

    No request samples. Nothing stays on the device from one step to the next; slots and rows are
    the scheduler's own accounts.
    """

    def __init__(
        self,
        *,
        model: EncoderModel,
        attention: EncoderAttention,
        pooler: Pooler,
        store: WeightStore,
        on_device: torch.device,
        device: StepDevice,
        kernels: Library | None = None,
    ) -> None:
        self.kernels = kernels  # the CPU kernels, if they compute
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._store = store
        self._like = torch.empty(0, device=on_device)
        self._device = device

    def launch(self, plan: Plan) -> Step:
        return self._device.launch(self._run, plan)

    def control(self, request: DeviceRequest) -> Pending:
        return self._device.run_exclusive(partial(self._store.do, request))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread that runs steps, after the launched steps, before any other."""
        return self._device.submit(work)

    def close(self) -> None:
        """Finish what is launched and end the thread."""
        self._device.close()

    @torch.inference_mode()
    def _run(self, plan: Plan) -> EncoderOutput:
        assert not plan.starts.any(), "an encoder gets whole prompts"
        assert not plan.samples.any(), "an encoder generates nothing"
        asked = find(plan.outputs, PoolingRequest)
        positions = consecutive(np.zeros(len(plan.lens), np.int64), plan.lens)
        types = np.zeros(plan.num_tokens, np.int32)
        if asked is not None and asked.types is not None:
            types = asked.types
        self._attention.prepare(plan.lens, self._like.device)
        tokens, where, kinds = (on(self._like, array) for array in (plan.tokens, positions, types))
        hidden = self._model.forward(tokens, where, kinds, self._attention)
        if asked is None:
            return EncoderOutput(())
        return EncoderOutput((PooledVectors(self._pooler(plan, asked, hidden)),))
