"""Allowed tokens: requests that may sample only some tokens, the same in every step
(`allowed_token_ids`).

The tokens do not depend on what is sampled, so steps overlap.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.plan.logits import AllowedTokens
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class AllowedTokensFeature(Feature):
    """Keeps the bitmask of each row."""

    sampling_fields = ("allowed_token_ids",)

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._masks: dict[int, IntArray] = {}  # [W] by row

    def enter_row(self, request: Request) -> None:
        allowed = request.message.sampling.allowed_token_ids
        self._masks[request.row] = self._packed(allowed)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._masks)
        if not found.rows:
            return
        masks = [self._masks[row] for row in found.rows]
        step.logits.append(AllowedTokens(found.index, np.stack(masks)))

    def release(self, request: Request) -> None:
        self._masks.pop(request.row, None)

    def _packed(self, ids: tuple[int, ...]) -> IntArray:
        # Bit t % 32 of word t // 32 is token t, as the sampler reads them.
        bits = np.zeros(32 * self._num_words, dtype=np.bool_)
        bits[list(ids)] = True
        words: IntArray = np.packbits(bits, bitorder="little").view(np.int32)
        return words
