"""Requests with a deadline for their first token: a request that cannot meet it is refused at once;
otherwise its client gets the expected wait.

    arrives ─▶ expected time, from the cost of steps (`scheduler/estimate/`), with a band around it
                 later than the deadline ─▶ 503, with a time to retry
                 in time ─▶ waits ─▶ first token: the band learns from the error

A request whose grammar is being compiled cannot begin before; one behind a blocked
input has no estimate. `GET /requests/{rid}` shows the estimate for every waiting request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.engine.core import EngineCore
from weft.engine.grammar_service import GrammarService
from weft.engine.hooks import Service
from weft.messages.control import Explanation
from weft.messages.replies import WAIT_HEADER, RequestWarning, StepOutput
from weft.scheduler.estimate.band import Calibration, WaitBand
from weft.scheduler.estimate.wait import WaitEstimator
from weft.scheduler.features.deadlines import DeadlineFeature
from weft.scheduler.history import EventKind
from weft.scheduler.limits import MAX_RETRY_S, MIN_RETRY_S
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.request import NO_ROW, Request

TOO_LATE = 503
# Seconds until the next walk over the queue, for each request that the last one has looked at. A
# look takes 7 to 27 us, so streams lose a tenth of their time to walks at most.
REST_S = 3e-4


@dataclass(slots=True)
class Promise:
    """The expected time of a request's first token."""

    made_s: float
    expected_s: float  # from then on, without the calibration
    band: WaitBand


class DeadlineService(Service):
    """Attached while a request with a deadline is open."""

    name = "deadlines"

    def __init__(
        self,
        core: EngineCore,
        feature: DeadlineFeature,
        grammars: GrammarService,
    ) -> None:
        self._core = core
        self._grammars = grammars
        self._feature = feature
        feature.wake = self._wake
        self.calibration = Calibration()
        self._promises: dict[int, Promise] = {}  # of requests that have no token yet
        self._open: dict[int, bool] = {}  # whether each may stop before its limit
        self._came: list[int] = []  # had their first token in this step
        self._rests_until_s = -math.inf  # nobody is judged before
        scheduler = core.scheduler
        self._estimator = WaitEstimator(
            scheduler.settings,
            kv=scheduler.kv,
            queue=scheduler.waiting_queue,
            pace=scheduler.pace,
            counters=scheduler.counters,
        )

    def _wake(self) -> None:
        self._core.hooks.attach(self)

    def wake_at(self) -> float:
        # In a pause nobody knows when requests can begin, nor while they are blocked.
        newcomers = self._feature.newcomers
        if not newcomers or self._core.hooks.holds_steps or self._is_blocked(newcomers[0]):
            return math.inf
        return self._rests_until_s

    def before_step(self, now: float) -> None:
        """Judge those that have come."""
        if now < self.wake_at():
            return
        newcomers = self._take_newcomers()
        ratio = self.calibration.band(1.0).likely_s
        wanted: dict[int, float] = {}
        for request in newcomers:
            if request.row == NO_ROW:
                wanted[request.id] = _left_s(request, now) / ratio
        expected_s = self._expected_s(wanted, now)
        self._rests_until_s = now + REST_S * self._estimator.num_looked
        warnings: list[RequestWarning] = []
        for request in newcomers:
            warnings += self._judge(
                request,
                expected_s.get(request.id),
                now,
            )
        if warnings:
            self._core.send(StepOutput(warnings=warnings))

    def _take_newcomers(self) -> list[Request]:
        """Those that are still there, up to the first blocked one: they are in order of arrival, so
        all later ones are blocked, too."""
        newcomers = self._feature.newcomers
        num_taken = 0
        while num_taken < len(newcomers) and not self._is_blocked(newcomers[num_taken]):
            num_taken += 1
        self._feature.newcomers = newcomers[num_taken:]
        requests = self._core.scheduler.requests
        return [requests[id] for id in newcomers[:num_taken] if id in requests]

    def _is_blocked(self, id: int) -> bool:
        scheduler = self._core.scheduler
        request = scheduler.requests.get(id)
        return request is not None and scheduler.waiting_queue.is_blocked(request)

    def _judge(
        self,
        request: Request,
        expected_s: float | None,
        now: float,
    ) -> list[RequestWarning]:
        """Refuse the request, or return the message for its client."""
        self._open[request.id] = not request.message.sampling.ignore_eos
        if expected_s is None:
            return []
        band = self.calibration.band(expected_s)
        waited_s = now - request.spec.arrival_s
        left_s = _left_s(request, now)
        if band.likely_s > left_s:
            self._refuse(request, band, left_s, waited_s)
            return []
        self._promises[request.id] = Promise(now, expected_s, band)
        words = _milliseconds(band, waited_s)
        self._core.note(request.id, EventKind.EXPECTED, f"its first token in {words} ms", now)
        return [RequestWarning(id=request.id, text=words, header=WAIT_HEADER)]

    def _refuse(
        self,
        request: Request,
        band: WaitBand,
        left_s: float,
        waited_s: float,
    ) -> None:
        del self._open[request.id]
        words = (
            f"the first token is expected in {_milliseconds(band, waited_s)} ms, "
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
        wanted: Mapping[int, float],
        now: float,
    ) -> dict[int, float]:
        """Seconds to the first tokens of requests that wait, as far as they are known; `wanted`:
        after how many each is refused."""
        if not wanted:
            return {}
        scheduler = self._core.scheduler
        in_flight = None
        if self._core.loop.first_in_flight is not None and scheduler.last_batch is not None:
            in_flight = StepLoad.of(scheduler.last_batch.plan)
        open_prompts = scheduler.prefills.open_prompts()
        times = self._estimator.first_tokens_s(wanted, now, open_prompts, in_flight)
        found: dict[int, float] = {}
        for id, seconds in times.items():
            blocked_s = self._blocked_s(scheduler.requests[id], now)
            if blocked_s is not None:
                found[id] = max(seconds, blocked_s)
        return found

    def _blocked_s(self, request: Request, now: float) -> float | None:
        """The earliest first token of a request that is not admitted yet for its own sake, in
        seconds from now: 0 if nothing holds it, None if nothing is known."""
        if self._core.scheduler.waiting_queue.is_blocked(request):
            return None
        compile_s = self._grammars.left_s(request, now)
        if not compile_s:
            return compile_s
        alone_s = self._estimator.alone_s(request)
        return None if alone_s is None else compile_s + alone_s

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Note the requests that get their first token or end in this output."""
        if self._promises and output.ids:
            ids = np.frombuffer(output.ids, dtype=np.int64)
            self._came += [id for id in set(ids.tolist()) if id in self._promises]
        for finish in output.finished:
            stops = self._open.pop(finish.id, False)
            if stops and finish.reason in ("stop", "length"):
                self._estimator.ended(finish.completion_tokens)
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
        if not (self._open or self._feature.newcomers):
            self._core.hooks.detach(self)

    def with_wait(
        self,
        found: Explanation,
        now: float,
    ) -> Explanation:
        """An explanation, with the expected wait if the request waits."""
        request = self._core.scheduler.requests.get(found.id)
        if request is None or request.row != NO_ROW:
            return found
        expected_s = self._expected_s({request.id: math.inf}, now).get(request.id)
        if expected_s is None:
            return found
        band = self.calibration.band(expected_s)
        return msgspec.structs.replace(found, first_token_in_s=band)


def _left_s(request: Request, now: float) -> float:
    """Until its first token is due."""
    waited_s = now - request.spec.arrival_s
    return request.message.ttft_ms / 1_000 - waited_s


def _milliseconds(band: WaitBand, waited_s: float) -> str:
    """The bounds for the client, counted from the arrival of a request that has waited
    `waited_s`."""
    low_ms = math.floor((waited_s + band.low_s) * 1_000)
    high_ms = math.ceil((waited_s + band.high_s) * 1_000)
    return f"{low_ms}-{high_ms}"
