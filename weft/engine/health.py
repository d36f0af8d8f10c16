"""Health checks: does the engine compute? They never wait for other work.

While requests run, the next result of a step is the answer. If no request runs, the engine
generates one token for a request of its own (the probe), which goes before all others and whose
output is not sent. A paused engine could compute, and answers at once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.control import HealthCheckReply
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams

PROBE = GenerateRequest(
    id=-2,  # requests from outside have ids from 0 on
    rid="health-check",
    input_ids=np.zeros(1, dtype=np.int32).tobytes(),
    sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
    cache_salt="\x1fhealth",  # shares no prefix with any other request
)
# For models that generate no tokens.
PROMPT_ONLY_PROBE = msgspec.structs.replace(PROBE, sampling=SamplingParams(max_new_tokens=0))


class HealthChecks(Service):
    """Attached while calls wait for an answer, or the probe is open."""

    name = "health checks"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: list[int] = []  # calls that wait for an answer
        self._num_results = 0  # results of the loop when the last call came
        self._has_probe = False  # whether the probe is open

    def ask(self, call: int, now: float) -> None:
        """Answer this call after the next result of a step."""
        self._calls.append(call)
        self._core.hooks.begin_work(self)
        self._num_results = self._core.loop.num_results
        self._open_probe(now)

    def after_step(self, now: float) -> None:
        if self._calls:
            if self._core.hooks.holds_steps:
                self._answer(True, "generation is paused")
            elif self._core.loop.num_results > self._num_results:
                self._answer(True)
            else:
                self._open_probe(now)  # the request that would have given a result may have ended
        if not self._calls and not self._has_probe:
            self._core.hooks.detach(self)

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Remove the output of the probe; if the probe failed, answer all calls."""
        if not self._has_probe:
            return output
        # Other requests may have come since, so the probe may be one of many in this step.
        others = []
        for finish in output.finished:
            if finish.id != PROBE.id:
                others.append(finish)
                continue
            self._has_probe = False
            if finish.status >= 400:
                self._answer(False, finish.message)
        ids = np.frombuffer(output.ids, dtype=np.int64)
        tokens = np.frombuffer(output.tokens, dtype=np.int32)
        is_other = ids != PROBE.id
        rest = msgspec.structs.replace(
            output,
            ids=ids[is_other].tobytes(),
            tokens=tokens[is_other].tobytes(),
            finished=others,
        )
        is_empty = not (rest.ids or rest.aux or rest.finished)
        return None if is_empty else rest

    def _open_probe(self, now: float) -> None:
        """Open the probe, unless a running request will give a result."""
        scheduler = self._core.scheduler
        num_running = len(scheduler.requests) - len(scheduler.waiting_queue)
        if num_running or self._has_probe:
            return
        probe = PROBE if scheduler.settings.pooling is None else PROMPT_ONLY_PROBE
        scheduler.add_request(probe, now, first=True)
        self._has_probe = True

    def _answer(self, success: bool, message: str = "") -> None:
        calls = self._calls
        self._calls = []
        for call in calls:
            self._core.send(HealthCheckReply(call=call, success=success, message=message))
