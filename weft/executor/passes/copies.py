"""Copies K and V between slots before a step, for prompts that share a part of a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.executor.device import DeviceOutput
from weft.executor.runner import Pass, Run
from weft.plan.step import Plan, SlotCopies


class CopyPass(Pass):
    """`tensors`: all that is kept of each slot, [slots, ...]."""

    name = "copies"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if len(tensor)]

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.copies is not None:
            self._copy(plan.copies)
        return then(plan)

    def _copy(self, copies: SlotCopies) -> None:
        device = self._tensors[0].device
        numbers = np.stack([copies.sources, copies.targets]).astype(np.int64)
        sources, targets = torch.from_numpy(numbers).to(device)
        for tensor in self._tensors:
            # A copy of its own first: a slot may be read here, and written for another request.
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
