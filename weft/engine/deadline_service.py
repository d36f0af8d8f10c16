"""Requests with a deadline for their first token: refused at once if they cannot meet it, and told
how long they will wait if they can.

    arrives ─▶ expected from what steps cost (`scheduler/estimate/`), with a band around it
                 later than the deadline ─▶ 503, and when to come again
                 in time ─▶ waits ─▶ first token: the band learns how far it was off

Its estimates stand in `GET /requests/{rid}` for every request that waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.control import Explanation
from weft.messages.replies import RequestWarning, StepOutput
from weft.scheduler.estimate.band import Calibration, WaitBand
from weft.scheduler.estimate.wait import WaitEstimator
from weft.scheduler.features.deadlines import DeadlineFeature
from weft.scheduler.history import EventKind
from weft.scheduler.limits import MAX_RETRY_S, MIN_RETRY_S
from weft.scheduler.request import NO_ROW, Request

TOO_LATE = 503
HEADER = "wait-ms"


@dataclass(slots=True)
class Promise:
    """What was expected of a request."""

    made_s: float
    expected_s: float  # from then on, before what earlier ones have taught
    band: WaitBand
    max_new: int


class DeadlineService(Service):
    """Attached while a request with a deadline is open."""

    name = "deadlines"

    def __init__(
        self,
        core: EngineCore,
        feature: DeadlineFeature,
    ) -> None:
        self._core = core
        self._feature = feature
        feature.wake = self._wake
        self.calibration = Calibration()
        self._promises: dict[int, Promise] = {}  # of requests that have no token yet
        self._limits: dict[int, int] = {}  # tokens that they allow, of all that are open
        self._came: list[int] = []  # had their first token in this step
        scheduler = core.scheduler
        self._estimator: WaitEstimator | None = None
        if scheduler.pace is not None:
            self._estimator = WaitEstimator(
                scheduler.settings,
                kv=scheduler.kv,
                queue=scheduler.waiting_queue,
                running=scheduler.running_batch,
                pace=scheduler.pace,
            )

    def _wake(self) -> None:
        self._core.hooks.attach(self)

    def before_step(self, now: float) -> None:
        """Judge those that have come."""
        newcomers = self._feature.newcomers
        if not newcomers:
            return
        self._feature.newcomers = []
        told: list[RequestWarning] = []
        for id in newcomers:
            request = self._core.scheduler.requests.get(id)
            if request is not None:
                told += self._judge(request, now)
        if told:
            self._core.send(StepOutput(warnings=told))

    def _judge(
        self,
        request: Request,
        now: float,
    ) -> list[RequestWarning]:
        """Refuse the request, or return what its client is told."""
        self._limits[request.id] = request.max_len - request.spec.prompt_len
        expected_s = self._expected_s(request, now)
        if expected_s is None:
            return []
        band = self.calibration.band(expected_s)
        waited_s = now - request.spec.arrival_s
        left_s = request.message.ttft_ms / 1_000 - waited_s
        if band.likely_s > left_s:
            self._refuse(request, band, left_s)
            return []
        self._promises[request.id] = Promise(now, expected_s, band, self._limits[request.id])
        words = _milliseconds(band)
        self._core.note(request.id, EventKind.EXPECTED, f"its first token in {words} ms", now)
        return [RequestWarning(id=request.id, text=words, header=HEADER)]

    def _refuse(
        self,
        request: Request,
        band: WaitBand,
        left_s: float,
    ) -> None:
        del self._limits[request.id]
        words = (
            f"the first token is expected in {_milliseconds(band)} ms, "
            f"which is later than ttft_ms ({request.message.ttft_ms:,}) allows"
        )
        retry_s = math.ceil(band.likely_s - left_s)
        self._core.scheduler.fail(
            request.id,
            words,
            TOO_LATE,
            retry_after_s=min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S),
        )

    def _expected_s(
        self,
        request: Request,
        now: float,
    ) -> float | None:
        if self._estimator is None or request.row != NO_ROW:
            return None
        open_prompts = self._core.scheduler.prefills.open_prompts()
        return self._estimator.first_token_s(request, now, open_prompts)

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Look who has a first token, and who has ended."""
        if self._promises and output.ids:
            ids = np.frombuffer(output.ids, dtype=np.int64)
            self._came += [id for id in set(ids.tolist()) if id in self._promises]
        for finish in output.finished:
            max_new = self._limits.pop(finish.id, None)
            if max_new is not None and self._estimator is not None:
                self._estimator.ended(finish.completion_tokens, max_new)
            if finish.id not in self._came:
                self._promises.pop(finish.id, None)
        return output

    def after_step(self, now: float) -> None:
        for id in self._came:
            promise = self._promises.pop(id, None)
            if promise is not None:
                actual_s = now - promise.made_s
                self.calibration.learn(promise.expected_s, promise.band, actual_s)
        self._came = []
        if not (self._limits or self._feature.newcomers):
            self._core.hooks.detach(self)

    def with_wait(
        self,
        found: Explanation,
        now: float,
    ) -> Explanation:
        """An explanation, with the wait that is expected, if the request waits."""
        request = self._core.scheduler.requests.get(found.id)
        if request is None or request.row != NO_ROW:
            return found
        expected_s = self._expected_s(request, now)
        if expected_s is None:
            return found
        band = self.calibration.band(expected_s)
        return msgspec.structs.replace(found, first_token_in_s=band)


def _milliseconds(band: WaitBand) -> str:
    """The bounds, as a client reads them."""
    low_ms = math.floor(band.low_s * 1_000)
    high_ms = math.ceil(band.high_s * 1_000)
    return f"{low_ms}-{high_ms}"
