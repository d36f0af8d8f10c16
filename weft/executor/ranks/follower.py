"""A rank that follows: it runs the plans that rank 0 sends, and samples nothing.

    link ─▶ plan ─▶ the same steps as on rank 0 ─▶ parts of sums and of logits
         ─▶ device request ─▶ store ─▶ reply

Its work together with other ranks must follow from the plan's numbers alone: if rank 0 summed or
gathered and this rank did not, both would wait for ever.
"""

from __future__ import annotations

from torch import Tensor

from weft.executor.device import DeviceOutput
from weft.executor.inputs import DeviceRowTable, Inputs
from weft.executor.outputs.prompt_logprobs import BLOCK_LEN
from weft.executor.ranks.leader import of_follower
from weft.executor.runner import DecoderOutput, DecoderSteps, Pass, Run, TorchRunner
from weft.executor.wire.followers import FAILED, PLAN, READ, REPLY, REQUEST
from weft.executor.wire.pack import pack, unpack, unpack_request
from weft.ops.sampling import on
from weft.ops.sharding import RankLost
from weft.parallel.links import Link
from weft.plan.device import Pending
from weft.plan.outputs import AuxRequest, PoolingRequest, PromptLogprobsRequest
from weft.plan.step import Plan


class FollowerSteps(DecoderSteps):
    """The `ModelSteps` of a rank that has a part of the logits, which rank 0 needs."""

    def finish(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> DecoderOutput:
        for request in plan.outputs:
            self._give_logits(plan, request, hidden)
        if len(inputs.last):
            self._model.logits(hidden, inputs.last)
        return DecoderOutput(None, ())

    def _give_logits(self, plan: Plan, request: AuxRequest, hidden: Tensor) -> None:
        """Compute the logits that rank 0 computes for this output (`executor/outputs/`), in the
        same pieces."""
        if isinstance(request, PromptLogprobsRequest):
            places = on(hidden, request.places)
            for begin in range(0, len(places), BLOCK_LEN):
                self._model.logits(hidden, places[begin : begin + BLOCK_LEN])
        elif isinstance(request, PoolingRequest) and request.labels is not None:
            ends = plan.lens.cumsum()[request.index]
            self._model.logits(hidden, on(hidden, ends - 1))


class PpStageSteps(DecoderSteps):
    """The `ModelSteps` of a stage before the last one: the output of its layers has been sent to
    the next stage, and nothing else is needed."""

    def finish(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> DecoderOutput:
        return DecoderOutput(None, ())


class FollowerTables(Pass):
    """On a rank that follows a rank with a draft model: of the draft model's steps, it only applies
    the changes of the table of slots."""

    name = "tables of drafts"

    def __init__(self, rows: DeviceRowTable) -> None:
        self._rows = rows

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.drafting is None:
            return then(plan)
        self._rows.apply(plan)
        return DecoderOutput(None, ())


def follow(runner: TorchRunner, link: Link, rank: int) -> None:
    """Do what rank 0 sends, until the link is closed. Raises the exception of a step after sending
    it."""
    reading: list[Pending] = []
    while True:
        try:
            kind, data = link.recv()
        except RankLost:
            return
        try:
            if kind == PLAN:
                runner.launch(unpack(data, Plan)).result()
            elif kind == READ:
                reading.append(runner.control(unpack_request(data)))
            elif kind == REQUEST:
                while reading:
                    reading.pop().result()
                request = of_follower(unpack_request(data), rank)
                link.send(REPLY, pack(runner.control(request).result()))
            else:
                raise RankLost(f"rank 0 has sent an invalid message: {kind!r}")
        except Exception as exc:
            link.send(FAILED, f"{type(exc).__name__}: {exc}".encode())
            raise
