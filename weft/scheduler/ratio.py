"""How much of their `max_new_tokens` running requests are expected to use (SGLang: new_token_ratio).

Starts high, falls with every decode step that fits in memory, and is raised by what is learnt when one does not.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import CLIP_MAX_NEW_TOKENS
from weft.scheduler.request import Columns

INIT_RATIO = 0.7
MIN_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # after a retraction there should be memory for so many steps


class NewTokenRatio:
    def __init__(self, conservativeness: float) -> None:
        self.init = min(INIT_RATIO * conservativeness, 1.0)
        self.min = self.init * MIN_FACTOR
        self._decay = (self.init - self.min) / DECAY_STEPS
        self.current = self.init

    def decay(self) -> None:
        """A decode step fitted."""
        self.current = max(self.current - self._decay, self.min)

    def raise_after_retraction(self, *, num_decoded: int, num_requests: int, max_new: int) -> None:
        """Requests were retracted; of those that go on, `num_decoded` of `max_new` tokens are there."""
        expected = (num_decoded + RETRACT_DECODE_STEPS * num_requests) / (max_new + 1)
        self.current = min(1.0, expected)

    def learn(self, columns: Columns, kept: IntArray) -> None:
        """Requests were retracted, and the rows `kept` go on."""
        self.raise_after_retraction(
            num_decoded=int((columns.known_len[kept] - columns.prompt_len[kept]).sum()),
            num_requests=len(kept),
            max_new=int((columns.max_len[kept] - columns.prompt_len[kept]).sum()),
        )

    def reset(self) -> None:
        """Nothing runs."""
        self.current = self.init


def expected_tokens(columns: Columns, rows: IntArray, ratio: float) -> float:
    """Tokens that running requests are expected to generate yet. One that ignores EOS will go to its end."""
    left = np.clip(
        columns.max_len[rows] - columns.seq_len[rows], 0, CLIP_MAX_NEW_TOKENS
    )  # below 0: wants no token
    at_eos = int(
        left[columns.stops_at_eos[rows]].sum()
    )  # whole numbers: the same sum on every machine
    return int(left.sum()) - at_eos + at_eos * ratio
