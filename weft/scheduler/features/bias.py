"""Values added to single logits: `logit_bias`, and `min_new_tokens`, which forbids the tokens that
end an output.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.plan.logits import LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class LogitBiasFeature(Feature):
    """Keeps, by row, the biased tokens with their values, and the ending tokens of requests with a
    minimum.

    Stop tokens may lie beyond the vocabulary: they have no logit that could be forbidden.
    """

    sampling_fields = ("logit_bias", "min_new_tokens")

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._biases: dict[int, tuple[IntArray, FloatArray]] = {}
        # With the sequence length from which they are allowed.
        self._ending: dict[int, tuple[IntArray, int]] = {}

    def enter_row(self, request: Request) -> None:
        sampling = request.message.sampling
        if sampling.logit_bias:
            tokens = np.fromiter(sampling.logit_bias, dtype=np.int32)
            values = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
            self._biases[request.row] = tokens, values
        if sampling.min_new_tokens:
            ending = {token for token in sampling.stop_token_ids if token < self._vocab_size}
            if not sampling.ignore_eos:
                ending.update(self._eos)
            if ending:
                tokens = np.array(sorted(ending), dtype=np.int32)
                self._ending[request.row] = (
                    tokens,
                    request.spec.prompt_len + sampling.min_new_tokens,
                )

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        biases: list[LogitBias] = []
        for i, row in enumerate(batch.sample_rows.tolist()):
            if row in self._biases:
                biases.append(bias_of(i, *self._biases[row]))
            if row in self._ending:
                tokens, min_len = self._ending[row]
                if columns.seq_len[row] <= min_len:
                    biases.append(forbidden(i, tokens))
        if biases:
            step.logits.append(joined(biases))

    def release(self, request: Request) -> None:
        self._biases.pop(request.row, None)
        self._ending.pop(request.row, None)


def forbidden(index: int, tokens: IntArray) -> LogitBias:
    """Sampling request `index` may not choose these tokens."""
    return bias_of(index, tokens, np.full(len(tokens), -np.inf, dtype=np.float32))


def bias_of(index: int, tokens: IntArray, values: FloatArray) -> LogitBias:
    """Add `values` [n] to the logits of `tokens` [n] of sampling request `index`."""
    return LogitBias(np.full(len(tokens), index, dtype=np.int32), tokens, values)


def joined(biases: list[LogitBias]) -> LogitBias:
    """Several biases, none of which depends on the last token, as one."""
    return LogitBias(
        index=np.concatenate([bias.index for bias in biases]),
        tokens=np.concatenate([bias.tokens for bias in biases]),
        values=np.concatenate([bias.values for bias in biases]),
    )
