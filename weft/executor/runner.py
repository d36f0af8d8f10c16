"""Runs plans on one device: rows and slots in, tokens out. It knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

import numpy as np
import torch

from weft.executor.backend import AttentionBackend
from weft.executor.control import DeviceRequest, Pending
from weft.executor.inputs import RowTable
from weft.executor.plan import Plan, Result, Step
from weft.executor.sampler import sample
from weft.executor.weights.keeper import Keeper
from weft.models.registry import Model
from weft.ops.sampling import Choose

T = TypeVar("T")


class TorchRunner:
    """The `Runner` that computes, in the order of launches: on `thread` (of which there is one), or where `steps` says.

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
        thread: Executor,
        steps: Executor | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._choose = choose
        self._rows = rows
        self._keeper = keeper
        self._thread = thread
        self._steps = thread if steps is None else steps

    def launch(self, plan: Plan) -> Step:
        return self._steps.submit(self._run, plan)

    def control(self, request: DeviceRequest) -> Pending:
        return self._thread.submit(self._keeper.do, request)

    def apart(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread that runs steps do `work`, behind those that are launched and before any other."""
        return self._steps.submit(work)

    def close(self) -> None:
        """Finish what is launched and end the thread."""
        self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Result:
        inputs = self._rows.apply(plan)
        if plan.num_tokens:
            self._attention.prepare(inputs.batch)
            hidden = self._model.forward(inputs.tokens, inputs.positions, self._attention)
        if not len(inputs.last):
            return Result(tokens=np.empty(0, np.int32))
        logits = self._model.logits(hidden[inputs.last])
        sampled = sample(self._choose, logits, plan.sampling, inputs.last_tokens)
        self._rows.last_tokens[inputs.sampling_rows] = sampled.tokens
        return sampled.result()
