"""Values added to single logits: `logit_bias`, and `min_new_tokens`, which forbids the tokens that
end an output.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.sampling import SamplingParams
from weft.plan.logits import LogitBias
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class TokenBias(NamedTuple):
    """The values that one request adds to the logits of some tokens."""

    tokens: IntArray  # [n]
    values: FloatArray  # [n]


class StopTokens(NamedTuple):
    """The tokens that may not end a request yet."""

    tokens: IntArray  # [n]
    min_len: int  # length of the sequence from which they are allowed


class LogitBiasFeature(Feature):
    """Keeps, by row, the biased tokens with their values, and the stop tokens of requests with a
    minimal length."""

    sampling_fields = ("logit_bias", "min_new_tokens")

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._biases: dict[int, TokenBias] = {}
        self._stop_tokens: dict[int, StopTokens] = {}

    def enter_row(self, request: Request) -> None:
        sampling = request.message.sampling
        if sampling.logit_bias:
            tokens = np.fromiter(sampling.logit_bias, dtype=np.int32)
            values = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
            self._biases[request.row] = TokenBias(tokens, values)
        if sampling.min_new_tokens:
            tokens = self._tokens_of(sampling)
            min_len = request.spec.prompt_len + sampling.min_new_tokens
            if len(tokens):
                self._stop_tokens[request.row] = StopTokens(tokens, min_len)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        biases: list[LogitBias] = []
        lens = batch.sample_lens.tolist()
        for i, row in enumerate(batch.sample_rows.tolist()):
            bias = self._biases.get(row)
            if bias is not None:
                biases.append(bias_of(i, bias.tokens, bias.values))
            stop = self._stop_tokens.get(row)
            if stop is not None and lens[i] < stop.min_len:
                biases.append(forbidden(i, stop.tokens))
        if biases:
            step.logits.append(joined(biases))

    def release(self, request: Request) -> None:
        self._biases.pop(request.row, None)
        self._stop_tokens.pop(request.row, None)

    def _tokens_of(self, sampling: SamplingParams) -> IntArray:
        """[n] the tokens that end an output."""
        stop = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop.update(self._eos)
        tokens: IntArray = np.array(sorted(stop), dtype=np.int64)
        # Stop tokens may be outside of the vocabulary: they have no logit to change.
        return tokens[tokens < self._vocab_size].astype(np.int32)


def forbidden(index: int, tokens: IntArray) -> LogitBias:
    """Sampling request `index` may not choose these tokens."""
    values = np.full(len(tokens), -np.inf, dtype=np.float32)
    return bias_of(index, tokens, values)


def bias_of(index: int, tokens: IntArray, values: FloatArray) -> LogitBias:
    """Add `values` [n] to the logits of `tokens` [n] of sampling request `index`."""
    indices = np.full(len(tokens), index, dtype=np.int32)
    return LogitBias(indices, tokens, values)


def joined(biases: list[LogitBias]) -> LogitBias:
    """Several biases, none of which depends on the last token, as one."""
    return LogitBias(
        index=np.concatenate([bias.index for bias in biases]),
        tokens=np.concatenate([bias.tokens for bias in biases]),
        values=np.concatenate([bias.values for bias in biases]),
    )
