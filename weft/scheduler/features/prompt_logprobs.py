"""Log probabilities of prompt tokens, for the requests that ask for them. They are sent in pieces,
as they are computed.

The step that computes a token gives the log probability of the next token, so the first requested
token has none. Tokens in the prefix cache are computed nevertheless
(`GenerateRequest.recompute_from`), but values that were sent before a retraction are not sent
again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.replies import PromptLogprobsPiece
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest
from weft.plan.step import Result, find
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepEffects, StepInputs
from weft.scheduler.request import Columns


class PromptLogprobsFeature(Feature):
    """Keeps no state: the values that were sent follow from `Request.reported_len`."""

    sampling_fields = ("prompt_logprobs",)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        pieces: list[tuple[int, _Piece]] = []
        for i, request in enumerate(batch.prefills):
            if request.message.sampling.prompt_logprobs is None:
                continue
            piece = _piece(batch, i)
            if piece is not None:
                pieces.append((i, piece))
        if pieces:
            step.outputs.append(_request(batch, columns, pieces))

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        asked = find(batch.plan.outputs, PromptLogprobsRequest)
        output = find(result.outputs, PromptLogprobs)
        if asked is None or output is None:
            return
        begin = 0
        for i, count in zip(asked.index.tolist(), asked.counts.tolist(), strict=True):
            places = slice(begin, begin + count)
            begin += count
            piece = _piece(batch, i)
            if columns.epoch[batch.rows[i]] == batch.epochs[i] and piece is not None:
                effects.aux.append(_message(batch, i, piece, columns, output, places))


class _Piece(NamedTuple):
    """The output of a step for one prompt: log probabilities of the tokens at low, low + 1, ...
    high - 1."""

    low: int
    high: int
    has_first: bool  # whether the token before `low` is the first requested one


def _request(
    batch: Batch, columns: Columns, pieces: list[tuple[int, _Piece]]
) -> PromptLogprobsRequest:
    """`pieces`: each with the index of its request in the step."""
    # Added to a position, the offset gives the index of the token in the step.
    offsets = np.cumsum(batch.lens) - batch.lens - batch.starts
    index: list[int] = []
    counts: list[int] = []
    num_top: list[int] = []
    ids: list[tuple[int, ...]] = []
    places: list[IntArray] = []
    targets: list[IntArray] = []
    for i, (low, high, _) in pieces:
        sampling = batch.prefills[i].message.sampling
        index.append(i)
        counts.append(high - low)
        num_top.append(sampling.prompt_logprobs or 0)
        ids.append(sampling.logprob_token_ids)
        places.append(np.arange(low - 1, high - 1, dtype=np.int32) + offsets[i])
        targets.append(columns.tokens[batch.rows[i], low:high])
    return PromptLogprobsRequest(
        index=np.array(index, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        num_top=np.array(num_top, dtype=np.int32),
        ids=padded(ids),
        places=np.concatenate(places).astype(np.int32),
        targets=np.concatenate(targets),
    )


def padded(lists: list[tuple[int, ...]]) -> IntArray:
    """Lists of ids as one array [n, M], padded with 0."""
    ids = np.zeros((len(lists), max(map(len, lists), default=0)), dtype=np.int32)
    for row, own in zip(ids, lists, strict=True):
        row[: len(own)] = own
    return ids


def _piece(batch: Batch, i: int) -> _Piece | None:
    """The output of a step for the prompt of its request i. The same when the step is planned and
    when it is committed.

    prompt   | 0 ... first ................. prompt_len
    computed |     start ........ end |
    given    |            low ...... high |
    """
    request = batch.prefills[i]
    first = request.message.sampling.prompt_logprobs_start
    start = int(batch.starts[i])
    end = start + int(batch.lens[i])
    prompt_len = request.spec.prompt_len
    reported_len = request.reported_len
    low = max(start, first, reported_len) + 1
    high = max(low, min(end + 1, prompt_len))
    is_here = start <= first < min(end, prompt_len)
    # Values that were sent before a retraction are not sent again.
    has_first = is_here and reported_len <= first
    if not has_first and low == high:
        return None
    return _Piece(low, high, has_first)


def _message(
    batch: Batch,
    i: int,
    piece: _Piece,
    columns: Columns,
    output: PromptLogprobs,
    places: slice,
) -> PromptLogprobsPiece:
    """`places`: the piece's tokens among those of the output."""
    request = batch.prefills[i]
    sampling = request.message.sampling
    num_top = min(sampling.prompt_logprobs or 0, output.top_ids.shape[1])
    num_ids = len(sampling.logprob_token_ids)
    head = int(piece.has_first)
    tokens = columns.tokens[request.row, piece.low - head : piece.high]
    return PromptLogprobsPiece(
        id=request.id,
        tokens=tokens.tobytes(),
        logprobs=_with_head(output.logprobs[places], head).tobytes(),
        ranks=_with_head(output.ranks[places], head).tobytes(),
        num_top=num_top,
        top_ids=_with_head(output.top_ids[places, :num_top], head).tobytes(),
        top_logprobs=_with_head(output.top_logprobs[places, :num_top], head).tobytes(),
        num_ids=num_ids,
        id_logprobs=_with_head(output.id_logprobs[places, :num_ids], head).tobytes(),
    )


def _with_head(values: IntArray | FloatArray, head: int) -> IntArray | FloatArray:
    """The values, after a line of NaN (floats) or zeros (ints) if there is a `head`."""
    if not head:
        return values
    first = np.zeros((1, *values.shape[1:]), dtype=values.dtype)
    if values.dtype.kind == "f":
        first[:] = np.nan
    return np.concatenate([first, values])
