"""Static batching in front of an engine: the baseline of `weft bench batching`.

    requests come ──▶ they are collected ──▶ the batch is full ──▶ engine, until the slowest ends
                                             (or no more will come)

A batch is computed as a rectangle: a row whose request is complete continues as padding, at the
same cost as before, until the slowest request of its batch has its last token. Then the next batch
begins. So the engine gets each request with the longest output length of its batch, and this class
discards the tokens beyond a request's own length. The engine, its scheduler and its runner are
those of a server. This module does not know what the figures are compared with.
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.sim.run import SteppableEngine


class StaticBatches:
    """Takes and returns messages like the engine that it wraps.

    A request must give its output length by `max_new_tokens`, and ignore the end-of-sequence token,
    because padding requires known lengths.
    """

    def __init__(self, engine: SteppableEngine, *, num_rows: int, num_requests: int) -> None:
        """`num_rows`: requests of a full batch. `num_requests`: all requests that will come."""
        self._engine = engine
        self._num_rows = num_rows
        self._num_expected = num_requests
        self._collected: list[GenerateRequest] = []
        self._wanted: dict[int, int] = {}  # tokens that each open request still needs
        self._got: dict[int, int] = {}  # tokens that each open request has
        self._running: set[int] = set()  # the requests of the batch, including padding
        self.num_padding = 0  # discarded tokens

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self._may_begin

    @property
    def _may_begin(self) -> bool:
        if self._running or not self._collected:
            return False
        return len(self._collected) >= self._num_rows or not self._num_expected

    def submit(self, message: ToEngine) -> FromEngine | None:
        assert isinstance(message, GenerateRequest)
        self._collected.append(message)
        self._num_expected -= 1
        return None

    def step(self) -> list[FromEngine]:
        if self._may_begin:
            self._begin()
        replies: list[FromEngine] = []
        for reply in self._engine.step():
            if isinstance(reply, StepOutput):
                reply = self._without_padding(reply)
            replies.append(reply)
        return replies

    def _begin(self) -> None:
        batch = self._collected[: self._num_rows]
        self._collected = self._collected[self._num_rows :]
        longest = max(_output_len(message) for message in batch)
        for message in batch:
            self._wanted[message.id] = _output_len(message)
            self._got[message.id] = 0
            self._running.add(message.id)
            sampling = msgspec.structs.replace(message.sampling, max_new_tokens=longest)
            self._engine.submit(msgspec.structs.replace(message, sampling=sampling))

    def _without_padding(self, output: StepOutput) -> StepOutput:
        """The part of an output that the requests get: tokens up to each one's own length, and its
        end."""
        ids = np.frombuffer(output.ids, dtype=np.int64)
        tokens = np.frombuffer(output.tokens, dtype=np.int32)
        is_wanted = np.zeros(len(ids), dtype=bool)
        finished: list[Finish] = []
        for place, id in enumerate(ids.tolist()):
            if not self._wanted.get(id):
                self.num_padding += 1
                continue
            is_wanted[place] = True
            self._wanted[id] -= 1
            self._got[id] += 1
            if not self._wanted[id]:
                finished.append(Finish(id=id, reason="length", completion_tokens=self._got[id]))
        for finish in output.finished:
            self._running.discard(finish.id)
            left = self._wanted.pop(finish.id)
            del self._got[finish.id]
            if left:
                finished.append(finish)  # it was refused, or it failed
        return StepOutput(
            ids=ids[is_wanted].tobytes(),
            tokens=tokens[is_wanted].tobytes(),
            finished=finished,
        )


def _output_len(message: GenerateRequest) -> int:
    wanted = message.sampling.max_new_tokens
    assert wanted is not None
    assert message.sampling.ignore_eos
    return wanted
