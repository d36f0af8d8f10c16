"""Log probabilities of prompt tokens, for the requests that ask for them. They go out in pieces, as they are computed.

The log probability of a token comes of the step that computes the one before it, and the first that is asked for is
told without one. Tokens that stand in the prefix cache are computed nevertheless (`GenerateRequest.fresh_from`), but
after a retraction nothing that has been told is told again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.replies import PromptPiece
from weft.plan.step import PlaceLogprobs, PromptLogprobs, Result
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part, StepReplies
from weft.scheduler.request import Columns


class Piece(NamedTuple):
    """What a step gives of one prompt: log probabilities of the tokens at low, low + 1, ... high - 1."""

    low: int
    high: int
    has_first: bool  # the token before `low` is the first that is asked for


class PromptLogprobsPart(Part):
    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        asking = [
            i for i, one in enumerate(batch.prefills) if one.sampling.prompt_logprobs is not None
        ]
        pieces = [(i, piece) for i in asking if (piece := _piece(batch, i)) is not None]
        if not pieces:
            return
        offsets = (
            np.cumsum(batch.lens) - batch.lens - batch.starts
        )  # from a position to its place in the step
        places = [np.arange(piece.low - 1, piece.high - 1) + offsets[i] for i, piece in pieces]
        targets = [columns.tokens[batch.rows[i], piece.low : piece.high] for i, piece in pieces]
        wishes = [batch.prefills[i].sampling for i, _ in pieces]
        extras.prompt_logprobs = PromptLogprobs(
            index=np.array([i for i, _ in pieces], dtype=np.int32),
            counts=np.array([piece.high - piece.low for _, piece in pieces], dtype=np.int32),
            num_top=np.array([wish.prompt_logprobs for wish in wishes], dtype=np.int32),
            ids=padded([wish.logprob_token_ids for wish in wishes]),
            places=np.concatenate(places).astype(np.int32),
            targets=np.concatenate(targets),
        )

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        asked = None if batch.plan.wanted is None else batch.plan.wanted.prompt_logprobs
        given = None if result.given is None else result.given.prompt_logprobs
        if asked is None or given is None:
            return
        begin = 0
        for i, count in zip(asked.index.tolist(), asked.counts.tolist(), strict=True):
            rows, begin = slice(begin, begin + count), begin + count
            piece = _piece(batch, i)
            if columns.epoch[batch.rows[i]] == batch.epochs[i] and piece is not None:
                replies.given.append(_message(batch, i, piece, columns, given, rows))


def padded(lists: list[tuple[int, ...]]) -> IntArray:
    """Lists of ids as one array [n, M], filled up with 0."""
    ids = np.zeros((len(lists), max(map(len, lists), default=0)), dtype=np.int32)
    for row, own in zip(ids, lists, strict=True):
        row[: len(own)] = own
    return ids


def _piece(batch: Batch, i: int) -> Piece | None:
    """What a step gives of the prompt of its request i. The same when it is planned and when it is committed.

    prompt   | 0 ... first ................. prompt_len
    computed |     start ........ end |
    given    |            low ...... high |
    """
    request = batch.prefills[i]
    first = request.sampling.prompt_logprobs_start
    start, end = int(batch.starts[i]), int(batch.starts[i] + batch.lens[i])
    low = max(start, first, request.reported_len) + 1
    high = max(low, min(end + 1, request.prompt_len))
    has_first = start <= first < min(end, request.prompt_len) and request.reported_len <= first
    return Piece(low, high, has_first) if has_first or low < high else None


def _message(
    batch: Batch, i: int, piece: Piece, columns: Columns, given: PlaceLogprobs, rows: slice
) -> PromptPiece:
    request = batch.prefills[i]
    wish = request.sampling
    num_top = min(wish.prompt_logprobs or 0, given.top_ids.shape[1])
    num_ids, head = len(wish.logprob_token_ids), int(piece.has_first)
    tokens = columns.tokens[request.row, piece.low - head : piece.high]
    return PromptPiece(
        id=request.id,
        tokens=tokens.tobytes(),
        logprobs=_with_head(given.logprobs[rows], head).tobytes(),
        ranks=_with_head(given.ranks[rows], head).tobytes(),
        num_top=num_top,
        top_ids=_with_head(given.top_ids[rows, :num_top], head).tobytes(),
        top_logprobs=_with_head(given.top_logprobs[rows, :num_top], head).tobytes(),
        num_ids=num_ids,
        id_logprobs=_with_head(given.id_logprobs[rows, :num_ids], head).tobytes(),
    )


def _with_head(values: IntArray | FloatArray, head: int) -> IntArray | FloatArray:
    """The values with a line of zeros or NaN before them, if there is a `head`."""
    return (
        values
        if not head
        else np.concatenate([np.full((1, *values.shape[1:]), _nothing(values)), values])
    )


def _nothing(values: IntArray | FloatArray) -> np.float32 | np.int32:
    return np.float32(np.nan) if values.dtype.kind == "f" else np.int32(0)
