"""The outcome of a request, read from its finish message.

DONE      it ended at a stop, or at its maximum length
ABORTED   its client left, or an operator aborted all open requests
REFUSED   the engine did not admit it, or ended it; `why_refused` gives the reason
"""

from __future__ import annotations

import re

from weft.messages.replies import Finish
from weft.scheduler.limits import QUEUE_IS_FULL

OPEN = 0
DONE = 1
REFUSED = 2
ABORTED = 3

# Reasons why the engine refused or ended a request.
QUEUE_FULL = "queue full"
TTFT = "ttft_ms"  # its first token could not come within its ttft_ms
TOO_LONG = "too long"  # prompt and output together never fit the context, or the memory
NOT_BEGUN = "not begun in time"  # its timeout, or --max-queue-s
NOT_ENDED = "not ended in time"  # its timeout, or --max-run-s
INVALID = "invalid"  # in itself: other settings of the scheduler do not help
FAILED = "failed"  # a fault, or the memory of the device was released

_NEVER_FITS = re.compile(r"together at most [\d,]+ fit$")


def state_of(finish: Finish) -> int:
    """DONE, ABORTED or REFUSED."""
    if finish.reason in ("stop", "length"):
        return DONE
    # An abort with the status of an error is a timeout by the engine.
    if finish.reason == "abort" and finish.status < 400:
        return ABORTED
    return REFUSED


def why_refused(finish: Finish) -> str:
    """The reason for which the engine refused or ended a request, in a few words."""
    status = finish.status
    if finish.reason == "abort":
        return NOT_BEGUN if status == 503 else NOT_ENDED
    if finish.message == QUEUE_IS_FULL.message:
        return QUEUE_FULL
    if status == 503 and "is later than ttft_ms" in finish.message:
        return TTFT
    if status == 400 and _NEVER_FITS.search(finish.message):
        return TOO_LONG
    return INVALID if 400 <= status < 500 else FAILED
