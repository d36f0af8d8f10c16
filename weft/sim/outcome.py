"""What became of a request, as its final word says it.

DONE      it came to its end: a stop, or the length that it asked for
ABORTED   its client left it, or whoever runs the server ended all that was open
REFUSED   the engine did not take it, or ended it itself; `why_refused` says why
"""

from __future__ import annotations

import re

from weft.messages.replies import Finish
from weft.scheduler.limits import QUEUE_IS_FULL

OPEN = 0
DONE = 1
REFUSED = 2
ABORTED = 3

# Why a request was refused, or ended by the engine.
QUEUE_FULL = "queue full"
TTFT = "ttft_ms"  # its first token could not come in the time that it gave
TOO_LONG = "too long"  # prompt and output never fit the context, or the memory
NOT_BEGUN = "not begun in time"  # its timeout, or --max-queue-s
NOT_ENDED = "not ended in time"  # its timeout, or --max-run-s
INVALID = "invalid"  # in itself: other settings of the scheduler change nothing
FAILED = "failed"  # a fault, or a device whose memory was released

_NEVER_FITS = re.compile(r"together at most [\d,]+ fit$")


def state_of(finish: Finish) -> int:
    """DONE, ABORTED or REFUSED."""
    if finish.reason in ("stop", "length"):
        return DONE
    # An abort with the status of an error is the engine's own: time was over.
    if finish.reason == "abort" and finish.status < 400:
        return ABORTED
    return REFUSED


def why_refused(finish: Finish) -> str:
    """Why the engine refused or ended a request, in few words."""
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
