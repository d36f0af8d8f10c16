"""What the encoder of pictures, videos and sounds costs, learnt online.

    seconds of a step = those of its tokens + token · encoded tokens

Knows nothing of requests. Plain Python floats: a replay must come to the same numbers.
"""

from __future__ import annotations

import math

from weft.plan.inputs import MediaVectors
from weft.plan.step import Plan, find

FORGET = 0.8  # weight of a measurement after another one
# In the first one memory is touched and programs are made: it says nothing of later steps.
NUM_IGNORED = 1


def num_encoded(plan: Plan) -> int:
    """Tokens that a step encodes."""
    op = find(plan.inputs, MediaVectors)
    if op is None:
        return 0
    return sum(one.length for one in op.encode)


class EncoderCost:
    def __init__(self) -> None:
        self._seconds = 0.0  # weighted sums over steps
        self._tokens = 0.0
        self._num_seen = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """To encode so many tokens took so long."""
        self._num_seen += 1
        if self._num_seen <= NUM_IGNORED or not math.isfinite(seconds):
            return
        self._seconds = FORGET * self._seconds + max(seconds, 0.0)
        self._tokens = FORGET * self._tokens + num_tokens

    def tokens_in(self, seconds: float) -> float:
        """How many tokens can be encoded in that time; 0 as long as nothing is known."""
        if not self._tokens:
            return 0.0
        return max(seconds, 0.0) * self._tokens / max(self._seconds, 1e-9)
