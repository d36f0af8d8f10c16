"""Choosing tokens with the CPU kernels. Tensors are on the CPU; `../sampling.py` is the
specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.cpp.abi import (
    ArgmaxArgs,
    DrawArgs,
    LogprobsArgs,
    MaskArgs,
    PenaliseArgs,
    StepArgs,
)
from weft.ops.cpp.library import Library
from weft.ops.sampling import SampledTokens, SamplingArrays, TokenHistory, TopLogprobTensors


class CppSamplerOps:
    """`SamplerOps` with the kernels of a library."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def tokens(self, logits: Tensor, draws: SamplingArrays) -> SampledTokens:
        tokens, max_logits = argmax(self._library, logits)
        if draws.temperature.any():
            draw(self._library, logits, max_logits, draws, tokens)
        return SampledTokens(tokens, max_logits)

    def mask(
        self,
        logits: Tensor,
        masks: Tensor,
        rows: Tensor,
    ) -> None:
        mask(self._library, logits, masks, rows)

    def penalise(
        self,
        logits: Tensor,
        seen: TokenHistory,
        last_tokens: Tensor,
    ) -> None:
        penalise(self._library, logits, seen, last_tokens)

    def logprobs(
        self, logits: Tensor, chosen: SampledTokens, rows: Tensor, num_top: int
    ) -> TopLogprobTensors:
        return logprobs(
            self._library,
            logits,
            chosen,
            rows,
            num_top,
        )


def argmax(library: Library, logits: Tensor) -> SampledTokens:
    """The largest logit of each row [S, V], and its token: the first of equal ones. A NaN counts as
    the largest."""
    num_rows = len(logits)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    max_logits = torch.empty(num_rows)
    args = ArgmaxArgs(*_rows(logits), tokens.data_ptr(), max_logits.data_ptr())
    library.run_one(args, StepArgs(num_rows))
    return SampledTokens(tokens, max_logits)


def draw(
    library: Library, logits: Tensor, max_logits: Tensor, draws: SamplingArrays, tokens: Tensor
) -> None:
    """Draw a token for each row [S, V] whose temperature is above 0, and write it to `tokens` [S].
    The tokens of other rows do not change."""
    columns = (
        _plain(draws.temperature, np.float32),
        _plain(draws.top_k, np.int32),
        _plain(draws.top_p, np.float32),
        _plain(draws.min_p, np.float32),
        _plain(draws.seeds, np.int64),
        _plain(draws.positions, np.int32),
    )
    assert all(len(column) == len(logits) for column in (*columns, max_logits, tokens))
    args = DrawArgs(
        *_rows(logits), max_logits.data_ptr(), *map(_address_of, columns), tokens.data_ptr()
    )
    library.run_one(args, StepArgs(len(logits)))


def mask(
    library: Library,
    logits: Tensor,
    masks: Tensor,
    rows: Tensor,
) -> None:
    """Forbid the tokens whose bit is 0 in `masks` [M, W] (int32); masks[i] is for row rows[i] [M]
    (int64) of the logits."""
    assert len(rows) == len(masks)
    read = (_address(masks, torch.int32), masks.shape[1], _address(rows, torch.int64))
    library.run_one(MaskArgs(*_rows(logits), len(rows), *read), StepArgs(len(rows)))


def penalise(
    library: Library,
    logits: Tensor,
    seen: TokenHistory,
    last_tokens: Tensor,
) -> None:
    """Lower the logits of tokens that occurred before; `last_tokens` [S] (int64) is the last token
    of each row."""
    columns = (
        _plain(seen.index, np.int32),
        _plain(seen.frequency, np.float32),
        _plain(seen.presence, np.float32),
        _plain(seen.repetition, np.float32),
        _plain(seen.history, np.int32),
        _plain(seen.offsets, np.int32),
        _plain(seen.output_starts, np.int32),
        _plain(seen.lacks_last, np.bool_),
    )
    assert len(last_tokens) == len(logits)
    args = PenaliseArgs(
        *_rows(logits), *map(_address_of, columns), _address(last_tokens, torch.int64)
    )
    library.run_one(args, StepArgs(len(seen.index)))


def logprobs(
    library: Library, logits: Tensor, chosen: SampledTokens, rows: Tensor, num_top: int
) -> TopLogprobTensors:
    """Log probabilities of the chosen and the `num_top` likeliest tokens of `rows` [L] (int64)."""
    assert 0 <= num_top <= logits.shape[1]
    found = TopLogprobTensors(
        logprob=torch.empty(len(rows)),
        top_ids=torch.empty(len(rows), num_top, dtype=torch.int32),
        top_logprobs=torch.empty(len(rows), num_top),
    )
    read = (_address(rows, torch.int64), chosen.max_logits.data_ptr(), chosen.tokens.data_ptr())
    wrote = (tensor.data_ptr() for tensor in found)
    library.run_one(LogprobsArgs(*_rows(logits), *read, num_top, *wrote), StepArgs(len(rows)))
    return found


def _rows(logits: Tensor) -> tuple[int, int, int]:
    """Address, vocabulary, stride."""
    assert logits.dtype == torch.float32, "logits are float32"
    assert logits.stride(1) == 1, "a row of logits is in one piece"
    return logits.data_ptr(), logits.shape[1], logits.stride(0)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype, f"{tensor.dtype} instead of {dtype}"
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _address_of(column: NDArray[Any]) -> int:
    return int(column.__array_interface__["data"][0])


def _plain(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """The array as the kernels read it: contiguous, of this type."""
    return np.ascontiguousarray(array, dtype=dtype)
