"""Input embeddings: vectors that the model reads instead of the embeddings of a prompt's tokens.

The vectors come with the request and are kept until it has ended, because a retracted request is
computed again. The token ids of such a prompt mean nothing (`GenerateRequest.shares_kv`), so the
prefix cache neither provides nor stores KV for it.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.plan.inputs import InputVectors
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import Refusal
from weft.scheduler.request import Columns, Request

VALUE_BYTES = 4  # float32


class InputVectorsFeature(Feature):
    """Keeps the vectors of open requests."""

    request_fields = ("vectors",)
    gives_inputs = True

    def __init__(self, hidden_size: int) -> None:
        """`hidden_size` of the model; 0: it takes no vectors."""
        self._hidden_size = hidden_size
        self.by_id: dict[int, FloatArray] = {}  # [prompt_len, hidden size]

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        num_tokens = message.prompt_len
        needed_bytes = num_tokens * self._hidden_size * VALUE_BYTES
        if len(message.vectors) == needed_bytes:
            return None
        num_values = len(message.vectors) // VALUE_BYTES
        needed = f"{num_tokens:,} tokens of {self._hidden_size:,} are needed"
        return Refusal(f"the input embeddings have {num_values:,} values; {needed}", 400)

    def arrive(self, message: GenerateRequest) -> None:
        rows = np.frombuffer(message.vectors, dtype=np.float32)
        self.by_id[message.id] = rows.reshape(-1, self._hidden_size)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        index: list[IntArray] = []
        rows: list[FloatArray] = []
        begin = 0  # index of the request's first token in the step
        pieces = zip(batch.prefills, batch.starts.tolist(), batch.lens.tolist(), strict=False)
        for request, start, length in pieces:
            vectors = self.by_id.get(request.id)
            if vectors is not None and start < len(vectors):
                # After a retraction, tokens of the output follow those of the prompt.
                piece = vectors[start : start + length]
                end = begin + len(piece)
                index.append(np.arange(begin, end, dtype=np.int32))
                rows.append(piece)
            begin += length
        if index:
            step.inputs.append(
                InputVectors(
                    index=np.concatenate(index),
                    rows=np.concatenate(rows),
                )
            )

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self.by_id.pop(request.id, None)
