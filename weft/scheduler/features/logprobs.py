"""Log probabilities of output tokens, for the requests that ask for them."""

from __future__ import annotations

import numpy as np

from weft.messages.replies import TokenLogprobs
from weft.plan.outputs import SampledLogprobs, SampledLogprobsRequest
from weft.plan.step import Result, find
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepEffects, StepInputs
from weft.scheduler.features.prompt_logprobs import padded
from weft.scheduler.request import Columns, Request


class LogprobsFeature(Feature):
    """Keeps, by row, how many of the likeliest tokens are asked for, and which other tokens."""

    sampling_fields = ("logprobs",)

    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}
        self._ids: dict[int, tuple[int, ...]] = {}  # other tokens, for rows that ask for some

    def enter_row(self, request: Request) -> None:
        sampling = request.message.sampling
        assert sampling.logprobs is not None
        self._num_top[request.row] = sampling.logprobs
        if sampling.logprob_token_ids:
            self._ids[request.row] = sampling.logprob_token_ids

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._num_top)
        if not found.rows:
            return
        ids = None
        if self._ids:
            ids = padded([self._ids.get(row, ()) for row in found.rows])
        num_top = [self._num_top[row] for row in found.rows]
        step.outputs.append(
            SampledLogprobsRequest(
                index=found.index,
                num_top=np.array(num_top, dtype=np.int32),
                ids=ids,
            )
        )

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        request = find(batch.plan.outputs, SampledLogprobsRequest)
        output = find(result.outputs, SampledLogprobs)
        if request is None or output is None:
            return
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        pairs = zip(request.index.tolist(), request.num_top.tolist(), strict=True)
        for number, (i, num_top) in enumerate(pairs):
            if not live[i]:
                continue
            row = int(batch.sample_rows[i])
            id_logprobs: list[float] = []
            if output.id_logprobs is not None:
                num_ids = len(self._ids.get(row, ()))
                id_logprobs = output.id_logprobs[number, :num_ids].tolist()
            effects.logprobs.append(
                TokenLogprobs(
                    id=int(columns.ids[row]),
                    logprob=float(output.logprob[number]),
                    top_ids=output.top_ids[number, :num_top].tolist(),
                    top_logprobs=output.top_logprobs[number, :num_top].tolist(),
                    id_logprobs=id_logprobs,
                )
            )

    def release(self, request: Request) -> None:
        self._num_top.pop(request.row, None)
        self._ids.pop(request.row, None)
