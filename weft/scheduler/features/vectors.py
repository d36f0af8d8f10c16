"""Vectors that stand for the tokens of a prompt: input embeddings.

They come with the request, and are kept until it has ended: a retracted request is computed anew. The ids of such a
prompt mean nothing (`Request.shares_kv`): no KV of it is found in the prefix cache or put there.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.plan.step import InputVectors
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits.refusal import Refusal
from weft.scheduler.request import Columns, Request


class VectorsPart(Part):
    def __init__(self, hidden_size: int) -> None:
        """`hidden_size` of the model; 0: it takes no vectors."""
        self._hidden_size = hidden_size
        self.by_id: dict[int, FloatArray] = {}  # [prompt_len, hidden size]

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        """Why the vectors of a request cannot be taken, if it has some."""
        num_tokens, num_values = len(message.input_ids) // 4, len(message.vectors) // 4
        if not message.vectors or len(message.vectors) == 4 * num_tokens * self._hidden_size:
            return None
        needed = f"{num_tokens:,} tokens of {self._hidden_size:,} are needed"
        return Refusal(f"the input embeddings have {num_values:,} values; {needed}", 400)

    def arrived(self, message: GenerateRequest) -> None:
        """The request is queued: keep its vectors, if it has some."""
        if message.vectors:
            rows = np.frombuffer(message.vectors, dtype=np.float32)
            self.by_id[message.id] = rows.reshape(-1, self._hidden_size)

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        if not self.by_id:
            return
        index, rows = [], []
        at = 0  # where the request's first token stands in the step
        for request, start, length in zip(
            batch.prefills, batch.starts.tolist(), batch.lens.tolist(), strict=False
        ):
            vectors = self.by_id.get(request.id)
            if vectors is not None and start < len(vectors):
                piece = vectors[
                    start : start + length
                ]  # what follows are tokens of the output, after a retraction
                index.append(np.arange(at, at + len(piece), dtype=np.int32))
                rows.append(piece)
            at += length
        if index:
            extras.vectors = InputVectors(index=np.concatenate(index), rows=np.concatenate(rows))

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self.by_id.pop(request.id, None)
