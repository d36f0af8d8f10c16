"""Log probabilities of output tokens, for the requests that ask for them."""

from __future__ import annotations

import numpy as np

from weft.executor.plan import Logprobs, Result
from weft.messages.replies import TokenLogprobs
from weft.scheduler.batch import Batch
from weft.scheduler.part import Part, SamplingExtras, StepReplies
from weft.scheduler.request import Columns, Request


class LogprobsPart(Part):
    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}  # by row

    def prepare(self, batch: Batch, columns: Columns, extras: SamplingExtras) -> None:
        for request in batch.prefills:
            if request.sampling.logprobs is not None:
                self._num_top[request.row] = request.sampling.logprobs
        if not self._num_top:
            return
        found = [(i, self._num_top[row]) for i, row in enumerate(batch.sample_rows.tolist()) if row in self._num_top]
        if found:
            index, num_top = zip(*found, strict=True)
            extras.logprobs = Logprobs(index=np.array(index, dtype=np.int32), num_top=np.array(num_top, dtype=np.int32))

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        asked, given = batch.plan.sampling.logprobs, result.logprobs
        if asked is None or given is None:
            return
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        for at, (i, num_top) in enumerate(zip(asked.index.tolist(), asked.num_top.tolist(), strict=True)):
            if live[i]:
                replies.logprobs.append(
                    TokenLogprobs(
                        id=int(columns.ids[batch.sample_rows[i]]),
                        logprob=float(given.logprob[at]),
                        top_ids=given.top_ids[at, :num_top].tolist(),
                        top_logprobs=given.top_logprobs[at, :num_top].tolist(),
                    )
                )

    def release(self, request: Request) -> None:
        self._num_top.pop(request.row, None)
