"""Runs plans of whole prompts through an encoder: tokens in, one vector for each prompt out. There is no KV, and
nothing stays on the device from one step to the next; slots and rows are the scheduler's books alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.executor.device import Device
from weft.executor.outputs.pooling import Pooler
from weft.executor.weights.keeper import Keeper
from weft.models.layers.encoder import WholeAttention
from weft.models.registry import Encoder
from weft.ops.cpp.library import Library
from weft.ops.sampling import on
from weft.plan.device import DeviceRequest, Pending
from weft.plan.step import Given, Plan, Result, Step

T = TypeVar("T")


@dataclass(frozen=True)
class Pooled:
    """The `Outcome` of a step."""

    given: Given | None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Pooled:
        return self

    def result(self) -> Result:
        return Result(tokens=np.empty(0, np.int32), given=self.given)


class StepAttention(WholeAttention, Protocol):
    """`WholeAttention` that is told each step's prompts."""

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt, which stand one behind the other."""
        ...


class EncoderRunner:
    """The `Runner` of a model that generates nothing. Prompts come whole, and nobody samples."""

    def __init__(
        self,
        model: Encoder,
        attention: StepAttention,
        pooler: Pooler,
        keeper: Keeper,
        on_device: torch.device,
        device: Device,
        kernels: Library | None = None,
    ) -> None:
        self.kernels = kernels  # of the CPU, if they compute
        self._model, self._attention, self._pooler = model, attention, pooler
        self._keeper = keeper
        self._like = torch.empty(0, device=on_device)
        self._device = device

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

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Pooled:
        assert not plan.starts.any(), "an encoder gets whole prompts"
        assert not plan.samples.any(), "an encoder generates nothing"
        wanted = None if plan.wanted is None else plan.wanted.pooling
        ends = np.cumsum(plan.lens, dtype=np.int64)
        positions = np.arange(plan.num_tokens) - np.repeat(ends - plan.lens, plan.lens)
        types = (
            np.zeros(plan.num_tokens, np.int32)
            if wanted is None or wanted.types is None
            else wanted.types
        )
        self._attention.prepare(plan.lens, self._like.device)
        tokens, where, kinds = (on(self._like, array) for array in (plan.tokens, positions, types))
        hidden = self._model.forward(tokens, where, kinds, self._attention)
        return Pooled(None if wanted is None else Given(pooled=self._pooler(plan, wanted, hidden)))
