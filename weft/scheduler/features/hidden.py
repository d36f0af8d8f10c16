"""Hidden states, for the requests that ask for them: of every token that is computed, or of the last one.

Each is told as a step computes it. What a retraction makes a later step compute again is not told again, except that of
the last token, which replaces the one before anyway.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray
from weft.messages.replies import FinishReason, HiddenStates
from weft.plan.step import HiddenStates as Asked
from weft.plan.step import Result
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part, StepReplies
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request

MESSAGE_VALUES = 1 << 22  # in one message


class HiddenStatesPart(Part):
    def __init__(self) -> None:
        self._rows: dict[int, Request] = {}  # that ask
        self._told: dict[int, int] = {}  # by request: positions whose states have come
        self._asked: dict[int, int] = {}  # and those that have, or that launched steps will bring

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            if request.sampling.hidden_states is not None and request.row not in self._rows:
                self._rows[request.row] = request
                self._asked[request.id] = self._told.setdefault(request.id, 0)
        if not self._rows:
            return
        index, counts, places = [], [], []
        for i, (row, place_end) in enumerate(
            zip(batch.rows.tolist(), np.cumsum(batch.lens).tolist(), strict=True)
        ):
            asking = self._rows.get(row)
            if asking is None:
                continue
            length = int(batch.lens[i])
            end = int(batch.starts[i]) + length  # position behind the last
            if asking.sampling.hidden_states == "last":
                count = int(i >= len(batch.prefills) or asking.completes)
            else:
                count = min(length, end - self._asked[asking.id])
            if count > 0:
                self._asked[asking.id] = end
                index.append(i)
                counts.append(count)
                places.append(np.arange(place_end - count, place_end, dtype=np.int32))
        if index:
            extras.hidden_states = Asked(
                index=np.array(index, dtype=np.int32),
                counts=np.array(counts, dtype=np.int32),
                places=np.concatenate(places),
            )

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        asked = None if batch.plan.wanted is None else batch.plan.wanted.hidden_states
        given = None if result.given is None else result.given.hidden_states
        if asked is None:
            return
        at = 0
        for i, count in zip(asked.index.tolist(), asked.counts.tolist(), strict=True):
            row, end = batch.rows[i], int(batch.starts[i] + batch.lens[i])
            if columns.epoch[row] == batch.epochs[i]:
                id = int(columns.ids[row])
                self._told[id] = end
                if given is not None:
                    replies.given += _messages(id, end - count, given[at : at + count])
            at += count

    def release(self, request: Request) -> None:
        """What launched steps would have brought is asked for again."""
        self._rows.pop(request.row, None)
        self._asked.pop(request.id, None)

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self._told.pop(request.id, None)


def _messages(id: int, start: int, states: FloatArray) -> list[HiddenStates]:
    """The states of the tokens from position `start` on, none of the messages larger than a channel takes."""
    length = max(1, MESSAGE_VALUES // states.shape[1])
    return [
        HiddenStates(id=id, start=start + at, num_tokens=len(piece), vectors=piece.tobytes())
        for at in range(0, len(states), length)
        if len(piece := states[at : at + length])
    ]
