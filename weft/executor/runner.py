"""Runs plans on one device: rows and slots in, tokens out. It knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.executor.backend import AttentionBackend
from weft.executor.cpu.fused_step import WholeSteps
from weft.executor.device import Device, Outcome
from weft.executor.gpu.graphs import StepGraphs
from weft.executor.inputs import RowTable
from weft.executor.logit_processors.processors import Processors
from weft.executor.outputs.give import give
from weft.executor.outputs.pooling import Pooler
from weft.executor.sampler import Sampled, sample
from weft.executor.weights.keeper import Keeper
from weft.models.registry import Model
from weft.ops.cpp.library import Library
from weft.ops.sampling import Choose
from weft.plan.device import DeviceRequest, Pending
from weft.plan.step import Given, Plan, Result, Step, Wanted

T = TypeVar("T")


class Computed(NamedTuple):
    """The `Outcome` of a step."""

    sampled: Sampled | None  # None: no request samples
    given: Given | None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Computed:
        return self._replace(sampled=None if self.sampled is None else self.sampled.moved(move))

    def result(self) -> Result:
        if self.sampled is None:
            return Result(tokens=np.empty(0, np.int32), given=self.given)
        result = self.sampled.result()
        return result if self.given is None else replace(result, given=self.given)


class TorchRunner:
    """The `Runner` that computes with torch or with what stands in for it, in the order of launches.

    The arrays of a plan are read when the step runs: they must not change before its result is there. A step that
    raises (its `result` does) leaves its tokens without K and V; later steps are not affected.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        choose: Choose,
        rows: RowTable,
        keeper: Keeper,
        device: Device,
        graphs: StepGraphs | None = None,
        whole_steps: WholeSteps | None = None,
        pooler: Pooler | None = None,
        processors: Processors | None = None,
        kernels: Library | None = None,
    ) -> None:
        self.kernels = kernels  # of the CPU, if they compute
        self._model = model
        self._attention = attention
        self._choose = choose
        self._rows = rows
        self._keeper = keeper
        self._device = device
        self._pooler = pooler
        self._processors = processors
        self._graphs = graphs
        self._whole_steps = whole_steps

    def launch(self, plan: Plan) -> Step:
        return self._device.launch(self._run, plan)

    def control(self, request: DeviceRequest) -> Pending:
        return self._device.between(partial(self._keeper.do, request))

    def apart(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread that runs steps do `work`, behind those that are launched and before any other."""
        return self._device.apart(work)

    def close(self) -> None:
        """Finish what is launched and end the thread."""
        self._device.close()

    def _give(self, plan: Plan, wanted: Wanted, hidden: Tensor) -> Given:
        return give(plan, wanted, hidden, self._model, self._choose, self._pooler)

    def _run(self, plan: Plan) -> Outcome:
        if self._whole_steps is not None and self._whole_steps.takes(plan):
            return self._whole_steps.run(plan)
        return self._compute(plan)

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> Computed:
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
        given = None if plan.wanted is None else self._give(plan, plan.wanted, hidden)
        if not len(inputs.last):
            return Computed(None, given)
        logits = self._model.logits(hidden.index_select(0, inputs.last))
        sampled = sample(
            self._choose, logits, plan.sampling, inputs.last_tokens, self._processors, inputs.draws
        )
        self._rows.last_tokens.index_copy_(0, inputs.sampling_rows, sampled.tokens)
        return Computed(sampled, given)
