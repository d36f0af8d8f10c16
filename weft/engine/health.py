"""Health checks: does the engine compute? They never queue behind work.

While requests run, the next result of a step is the answer. Where nothing runs, one token is generated for it, by a
request of the engine's own that goes before all others and that nobody outside gets to see. An engine that is paused
could compute, and says so at once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.messages.control import HealthCheckReply
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.scheduler import Scheduler

PROBE = GenerateRequest(
    id=-2,  # requests from outside have numbers from 0 on
    rid="health-check",
    input_ids=np.zeros(1, dtype=np.int32).tobytes(),
    sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
    cache_salt="\x1fhealth",  # shares no prefix with anybody
)
PROMPT_ALONE = msgspec.structs.replace(
    PROBE, sampling=SamplingParams(max_new_tokens=0)
)  # for models that make no tokens


class HealthChecks:
    def __init__(self) -> None:
        self._calls: list[int] = []  # that wait for an answer
        self._num_results = 0  # of the loop, when the last of them came
        self._has_probe = False  # the engine's own request has not ended

    @property
    def are_open(self) -> bool:
        return bool(self._calls)

    def ask(self, call: int, scheduler: Scheduler, num_results: int, now: float) -> None:
        """Answer this call with the first result after `num_results`."""
        self._calls.append(call)
        self._num_results = num_results
        self._probe(scheduler, now)

    def answers(
        self, scheduler: Scheduler, num_results: int, now: float, *, is_paused: bool
    ) -> list[HealthCheckReply]:
        """Replies that can be given after a step."""
        if is_paused:
            return self._answer(True, "generation is paused")
        if num_results > self._num_results:
            return self._answer(True)
        self._probe(scheduler, now)  # who was to bring the result may be gone
        return []

    def sifted(self, output: StepOutput) -> tuple[StepOutput | None, list[HealthCheckReply]]:
        """The output without the engine's own request; nothing if nothing is left. And the answers, if that failed."""
        if not self._has_probe:
            return output, []
        ids = np.frombuffer(output.ids, dtype=np.int64)
        is_other = ids != PROBE.id
        own = [finish for finish in output.finished if finish.id == PROBE.id]
        self._has_probe = not own
        tokens = np.frombuffer(output.tokens, dtype=np.int32)
        rest = msgspec.structs.replace(
            output,
            ids=ids[is_other].tobytes(),
            tokens=tokens[is_other].tobytes(),
            finished=[finish for finish in output.finished if finish.id != PROBE.id],
        )
        return rest if rest.ids or rest.given or rest.finished else None, self._failures(own)

    def _failures(self, own: list[Finish]) -> list[HealthCheckReply]:
        return self._answer(False, own[0].message) if own and own[0].status >= 400 else []

    def _probe(self, scheduler: Scheduler, now: float) -> None:
        """Compute a token, unless something runs whose result will do."""
        if len(scheduler.requests) == len(scheduler.waiting_queue) and not self._has_probe:
            probe = PROBE if scheduler.settings.pooling is None else PROMPT_ALONE
            scheduler.add_request(probe, now, first=True)
            self._has_probe = True

    def _answer(self, success: bool, message: str = "") -> list[HealthCheckReply]:
        calls, self._calls = self._calls, []
        return [HealthCheckReply(call=call, success=success, message=message) for call in calls]
