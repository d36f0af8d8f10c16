"""All limits of a request in one place: its length, its time, the tokens that end it, and when a
client whom the queue refused should come again.

It says what is over; the scheduler ends the request.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import BoolArray
from weft.messages.requests import GenerateRequest
from weft.scheduler.limits.deadlines import Deadlines
from weft.scheduler.limits.drain import Drain
from weft.scheduler.limits.refusal import Refusal, refusal
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings


class RequestLimits:
    def __init__(self, settings: SchedulerSettings, capacity: int) -> None:
        """`capacity`: tokens that the KV pool has room for."""
        self.max_len = min(settings.context_length, capacity)  # prompt and output together
        self.deadlines = Deadlines(max_queue_s=settings.max_queue_s, max_run_s=settings.max_run_s)
        self._drain = Drain()
        self.is_eos: BoolArray = np.zeros(settings.vocab_size, dtype=np.bool_)  # [vocab_size]
        self.is_eos[list(settings.eos_token_ids)] = True

    def refusal(self, message: GenerateRequest, settings: SchedulerSettings) -> Refusal | None:
        """Why a request cannot be taken; None if it can."""
        return refusal(message, settings, max_len=self.max_len)

    def max_len_of(self, message: GenerateRequest, prompt_len: int) -> int:
        """Prompt and output of a request together, in tokens."""
        max_new = message.sampling.max_new_tokens
        return self.max_len if max_new is None else prompt_len + max_new

    def admitted(self, request: Request, now: float) -> None:
        """A request has got a row for the first time."""
        self._drain.admitted(now)
        self.deadlines.admitted(request)

    def retry_after_s(self, status: int, num_waiting: int, now: float) -> int:
        """When to come again, for those that the queue refused or kept too long; 0: not said."""
        if status != 503:
            return 0
        return self._drain.retry_after_s(num_waiting, now)

    def shrink(self, context_length: int, capacity: int) -> None:
        """Less fits than before: KV memory was lost."""
        self.max_len = min(context_length, capacity)
