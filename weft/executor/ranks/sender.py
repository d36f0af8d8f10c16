"""Sends plans to followers: when rank 0 begins them, or, so that stages work at once, when they are
launched.

    launch ─▶ PlanSender ─▶ the earlier stages, which begin
           └▶ the device's thread ─▶ the steps of this stage, when the others have got so far
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from weft.executor.device import DeviceOutput, StepDevice
from weft.executor.inputs import DeviceRowTable
from weft.executor.wire.followers import PLAN, Followers
from weft.executor.wire.pack import pack
from weft.plan.inputs import MediaVectors
from weft.plan.outputs import SampledLogprobsRequest
from weft.plan.step import (
    LAST_SAMPLED,
    Plan,
    Sampling,
    Step,
    find,
)

T = TypeVar("T")


class PlanSender:
    """Sends each plan once to the followers, in the order of launches: early, unless a part of it
    must be computed first, or an earlier plan has to wait for that."""

    def __init__(self, followers: Followers, rows: DeviceRowTable) -> None:
        """`rows`: the row table of this rank."""
        self.followers = followers
        self.rows = rows
        self._lock = threading.Lock()
        # for steps that have not begun: whether the plan was sent
        self._launched: deque[bool] = deque()
        self._num_untold = 0  # launched plans that were not sent

    def announce(self, plan: Plan) -> None:
        """A plan is being launched. Called on the launching thread. Raises RankLost."""
        with self._lock:
            is_sent = not self._num_untold and not needs_device(plan)
            if is_sent:
                self._send(plan)
            else:
                self._num_untold += 1
            self._launched.append(is_sent)

    def begin(self, plan: Plan) -> None:
        """A plan begins to be computed. Called on the device's thread. Raises RankLost."""
        with self._lock:
            is_sent = bool(self._launched) and self._launched.popleft()
            if is_sent:
                return
            self._send(plan)
            self._num_untold = max(self._num_untold - 1, 0)

    def _send(self, plan: Plan) -> None:
        self.followers.tell(PLAN, pack(without_sampling(plan, self.rows.last_tokens)))


class AnnouncingDevice:
    """The `StepDevice` of a stage whose plans are sent when they are launched."""

    def __init__(self, device: StepDevice, sender: PlanSender) -> None:
        self._device = device
        self._sender = sender

    def launch(self, run: Callable[[Plan], DeviceOutput], plan: Plan) -> Step:
        self._sender.announce(plan)
        return self._device.launch(run, plan)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._device.submit(work)

    def run_exclusive(self, work: Callable[[], T]) -> Future[T]:
        return self._device.run_exclusive(work)

    def close(self) -> None:
        self._device.close()


def needs_device(plan: Plan) -> bool:
    """Whether rank 0 must compute a part of the plan before it can be sent."""
    return plan.drafting is not None or find(plan.inputs, MediaVectors) is not None


def without_sampling(plan: Plan, last_tokens: Tensor) -> Plan:
    """The part of a plan that followers need: sampled tokens are known, and there is no
    sampling."""
    tokens = plan.tokens
    is_sampled = tokens == LAST_SAMPLED
    if is_sampled.any():
        rows = np.repeat(plan.rows, plan.lens)
        known = last_tokens.numpy(force=True)[rows]
        tokens = np.where(is_sampled, known, tokens).astype(np.int32)
    return replace(
        plan,
        tokens=tokens,
        sampling=Sampling.greedy(len(plan.sampling.positions)),
        logits=(),
        # Log probabilities of sampled tokens are computed from logits that rank 0 has anyway.
        outputs=tuple(one for one in plan.outputs if not isinstance(one, SampledLogprobsRequest)),
        ahead=None,
    )
