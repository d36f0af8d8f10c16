"""Takes the result of a step into the columns: appends tokens, and finds the requests that end with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.executor.plan import BoolArray, IntArray, LongArray, Result
from weft.messages.replies import FinishReason
from weft.scheduler.batch import Batch
from weft.scheduler.request import Columns


class End(NamedTuple):
    """A request that its last token ended."""

    row: int
    reason: FinishReason
    matched: int | None = None  # the token that stopped it
    message: str = ""  # why, for an error


class Outcome(NamedTuple):
    ids: LongArray  # [n] Request.id
    tokens: IntArray  # [n]
    ends: list[End]


def commit(columns: Columns, batch: Batch, result: Result, is_eos: BoolArray, others: Sequence[End] = ()) -> Outcome:
    """Append the tokens of requests that still have their row, and say which of these end.

    `is_eos` [vocab_size] tells the model's end-of-sequence tokens. A request whose logits were not finite gets no token
    and ends with an error. `others` are ends that parts have found; that of a stop token goes before them, and they go
    before that by length.
    """
    live = batch.is_live(columns)
    ends: list[End] = []
    if result.invalid is not None:
        invalid = batch.sample_rows[live & result.invalid].tolist()
        ends += [End(row, "error", message="the model's output was not finite") for row in invalid]
        live &= ~result.invalid
    rows: IntArray = batch.sample_rows[live]
    tokens: IntArray = result.tokens[live]
    known = columns.known_len[rows]
    columns.tokens[rows, known] = tokens
    known += 1
    columns.known_len[rows] = known

    stopped = is_eos[tokens] & columns.stops_at_eos[rows]
    special = columns.has_stop_ids[rows]
    if special.any():
        for i in np.flatnonzero(special).tolist():
            stopped[i] |= int(tokens[i]) in columns.requests[rows[i]].sampling.stop_token_ids
    ended = stopped | (known >= columns.max_len[rows])
    found = {end.row: end for end in others}
    for i in np.flatnonzero(ended).tolist():
        row = int(rows[i])
        if stopped[i]:
            found[row] = End(row, "stop", int(tokens[i]))
        else:
            found.setdefault(row, End(row, "length"))
    return Outcome(columns.ids[rows], tokens, [*ends, *found.values()])
