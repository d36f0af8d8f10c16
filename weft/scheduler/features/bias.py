"""Values added to single logits: `logit_bias`, and `min_new_tokens` (which forbids the tokens that would end it)."""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.plan.step import LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request


class Bias(Part):
    """Keeps, by row, the tokens and values of requests with a bias, and the ending tokens of those with a minimum.

    Stop tokens may lie beyond the vocabulary: they have no logit that could be forbidden.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._fixed: dict[int, tuple[IntArray, FloatArray]] = {}
        self._ending: dict[
            int, tuple[IntArray, int]
        ] = {}  # and the sequence length from which they are allowed

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            self._enter(request)
        if not (self._fixed or self._ending):
            return
        for i, row in enumerate(batch.sample_rows.tolist()):
            if row in self._fixed:
                extras.biases.append(_bias(i, *self._fixed[row]))
            if row in self._ending:
                tokens, min_len = self._ending[row]
                if columns.seq_len[row] <= min_len:
                    extras.biases.append(forbidden(i, tokens))

    def release(self, request: Request) -> None:
        self._fixed.pop(request.row, None)
        self._ending.pop(request.row, None)

    def _enter(self, request: Request) -> None:
        sampling = request.sampling
        if sampling.logit_bias:
            tokens = np.fromiter(sampling.logit_bias, dtype=np.int32)
            self._fixed[request.row] = (
                tokens,
                np.fromiter(sampling.logit_bias.values(), dtype=np.float32),
            )
        if sampling.min_new_tokens:
            ending = {token for token in sampling.stop_token_ids if token < self._vocab_size}
            if not sampling.ignore_eos:
                ending.update(self._eos)
            if ending:
                tokens = np.array(sorted(ending), dtype=np.int32)
                self._ending[request.row] = tokens, request.prompt_len + sampling.min_new_tokens


def forbidden(index: int, tokens: IntArray) -> LogitBias:
    """Sampling request `index` may not choose these."""
    return _bias(index, tokens, np.full(len(tokens), -np.inf, dtype=np.float32))


def _bias(index: int, tokens: IntArray, values: FloatArray) -> LogitBias:
    return LogitBias(
        index=np.full(len(tokens), index, dtype=np.int32), tokens=tokens, values=values
    )
