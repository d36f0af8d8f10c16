"""Log probabilities of output tokens, for the requests that ask for them."""

from __future__ import annotations

import numpy as np

from weft.messages.replies import TokenLogprobs
from weft.plan.step import Logprobs, Result
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part, StepReplies
from weft.scheduler.features.prompt_logprobs import padded
from weft.scheduler.request import Columns, Request


class LogprobsPart(Part):
    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}  # by row
        self._ids: dict[int, tuple[int, ...]] = {}  # by row: tokens that are wanted in any case

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            if request.sampling.logprobs is not None:
                self._num_top[request.row] = request.sampling.logprobs
                if request.sampling.logprob_token_ids:
                    self._ids[request.row] = request.sampling.logprob_token_ids
        if not self._num_top:
            return
        found = [
            (i, row) for i, row in enumerate(batch.sample_rows.tolist()) if row in self._num_top
        ]
        if found:
            index, rows = zip(*found, strict=True)
            extras.logprobs = Logprobs(
                index=np.array(index, dtype=np.int32),
                num_top=np.array([self._num_top[row] for row in rows], dtype=np.int32),
                ids=padded([self._ids.get(row, ()) for row in rows]) if self._ids else None,
            )

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        asked, given = batch.plan.sampling.logprobs, result.logprobs
        if asked is None or given is None:
            return
        live = batch.is_live(columns)
        if result.invalid is not None:
            live &= ~result.invalid
        for at, (i, num_top) in enumerate(
            zip(asked.index.tolist(), asked.num_top.tolist(), strict=True)
        ):
            if live[i]:
                num_ids = len(self._ids.get(int(batch.sample_rows[i]), ()))
                replies.logprobs.append(
                    TokenLogprobs(
                        id=int(columns.ids[batch.sample_rows[i]]),
                        logprob=float(given.logprob[at]),
                        top_ids=given.top_ids[at, :num_top].tolist(),
                        top_logprobs=given.top_logprobs[at, :num_top].tolist(),
                        id_logprobs=[]
                        if given.id_logprobs is None
                        else given.id_logprobs[at, :num_ids].tolist(),
                    )
                )

    def release(self, request: Request) -> None:
        self._num_top.pop(request.row, None)
        self._ids.pop(request.row, None)
