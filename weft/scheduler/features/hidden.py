"""Hidden states, for the requests that ask for them: of every computed token, or of the last one.

They are sent as the steps compute them. States that a step computes again after a retraction are
not sent again, except the state of the last token, which replaces the one before anyway.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.replies import FinishReason, HiddenStatesPiece
from weft.plan.outputs import HiddenStatesRequest, TokenStates
from weft.plan.step import Result, find
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepEffects, StepInputs
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request

MESSAGE_VALUES = 1 << 22  # numbers in one message


class HiddenStatesFeature(Feature):
    """Keeps, by request, the positions up to which states have been received and requested."""

    sampling_fields = ("hidden_states",)
    no_draft = "it asks for hidden states, and those of wrong guesses would be sent"

    def __init__(self) -> None:
        self._rows: dict[int, Request] = {}  # requests that ask for states
        # end of the positions whose states have come, by request id
        self._reported: dict[int, int] = {}
        # the same, including states that launched steps will return
        self._asked: dict[int, int] = {}

    def enter_row(self, request: Request) -> None:
        self._rows[request.row] = request
        self._asked[request.id] = self._reported.setdefault(request.id, 0)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        index: list[int] = []
        counts: list[int] = []
        places: list[IntArray] = []
        rows = batch.rows.tolist()
        ends = np.cumsum(batch.lens).tolist()  # of the requests' tokens in the step
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            request = self._rows.get(row)
            if request is None:
                continue
            count = self._num_asked(request, batch, i)
            if count <= 0:
                continue
            self._asked[request.id] = int(batch.starts[i] + batch.lens[i])
            index.append(i)
            counts.append(count)
            places.append(np.arange(end - count, end, dtype=np.int32))
        if index:
            step.outputs.append(
                HiddenStatesRequest(
                    index=np.array(index, dtype=np.int32),
                    counts=np.array(counts, dtype=np.int32),
                    places=np.concatenate(places),
                )
            )

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        request = find(batch.plan.outputs, HiddenStatesRequest)
        output = find(result.outputs, TokenStates)
        if request is None:
            return
        begin = 0  # of the request's states in the output
        counts = request.counts.tolist()
        for i, count in zip(request.index.tolist(), counts, strict=True):
            places = slice(begin, begin + count)
            begin += count
            row = batch.rows[i]
            if columns.epoch[row] != batch.epochs[i]:
                continue  # it has left
            id = int(columns.ids[row])
            end = int(batch.starts[i] + batch.lens[i])
            self._reported[id] = end
            if output is not None:
                states = output.states[places]
                effects.aux += _messages(id, end - count, states)

    def release(self, request: Request) -> None:
        """States of launched steps will not be used: they are requested again."""
        self._rows.pop(request.row, None)
        self._asked.pop(request.id, None)

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self._reported.pop(request.id, None)

    def _num_asked(self, request: Request, batch: Batch, i: int) -> int:
        """The number of last tokens in the step whose states are requested."""
        if request.message.sampling.hidden_states == "last":
            is_last = i >= len(batch.prefills) or request.completes
            return int(is_last)
        length = int(batch.lens[i])
        end = int(batch.starts[i]) + length
        return min(length, end - self._asked[request.id])


def _messages(id: int, start: int, states: FloatArray) -> list[HiddenStatesPiece]:
    """The states [n, H] of the tokens from position `start` on, in messages of limited size."""
    length = max(1, MESSAGE_VALUES // states.shape[1])
    messages = []
    for begin in range(0, len(states), length):
        piece = states[begin : begin + length]
        messages.append(
            HiddenStatesPiece(
                id=id,
                start=start + begin,
                num_tokens=len(piece),
                vectors=piece.tobytes(),
            )
        )
    return messages
