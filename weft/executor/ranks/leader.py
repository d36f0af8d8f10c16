"""Rank 0, which decides: it runs the steps, and lets all other ranks run the same.

    plan ─▶ LeaderPass ─▶ plan without sampling ─▶ followers
                     └──▶ the steps of this rank ─▶ tokens

Only the runner knows of it: the scheduler, the messages and the journal are those of an engine with
one rank. The work of followers follows from the numbers in the plan alone. They learn sampled
tokens from the next plan: all earlier steps have ended then, so every token is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.executor.device import DeviceOutput
from weft.executor.ranks.sender import PlanSender
from weft.executor.runner import Do, Pass, Run
from weft.executor.wire.followers import READ, REQUEST
from weft.executor.wire.pack import pack
from weft.ops.sharding import RankLost
from weft.plan.device import DeviceReply, DeviceRequest, JoinGroup, ReadAdapter, RecordExperts
from weft.plan.inputs import InputOp, InputVectors, MediaVectors
from weft.plan.step import Plan, find


class LeaderPass(Pass):
    """Lets every rank run each step and carry out each request; the replies of ranks are joined."""

    name = "ranks"

    def __init__(self, sender: PlanSender, *, is_staged: bool) -> None:
        """`is_staged`: each rank has some of the layers."""
        self.sender = sender
        self._is_staged = is_staged
        self._followers = sender.followers

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        plan = self._encoded(plan)
        self.sender.begin(plan)
        try:
            return then(plan)
        except RankLost as exc:
            raise self._followers.explain(exc) from exc

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        if isinstance(request, RecordExperts) and self._is_staged:
            return DeviceReply(
                ok=False, message="experts are not counted with --pp-size: no rank sees all layers"
            )
        if isinstance(request, RecordExperts):
            return then(request)  # all ranks choose the same experts
        if isinstance(request, ReadAdapter):
            # While steps run, so not on their thread. A rank that cannot read the adapter reports
            # it when the adapter is loaded.
            self._followers.note(READ, pack(request))
            return then(request)
        try:
            self._followers.tell(REQUEST, pack(request))
            mine = then(request)
            return self._joined([mine, *self._followers.replies()])
        except RankLost as exc:
            return DeviceReply(ok=False, message=str(exc), status=500)

    def _encoded(self, plan: Plan) -> Plan:
        """The plan with vectors instead of the encoder's inputs: only rank 0 runs the encoder, and
        followers get its output."""
        media = self.sender.rows.media
        if media is None or find(plan.inputs, MediaVectors) is None:
            return plan
        inputs: list[InputOp] = []
        for op in plan.inputs:
            if isinstance(op, MediaVectors):
                op = InputVectors(op.index, media.take(op).numpy(force=True))
            inputs.append(op)
        return replace(plan, inputs=tuple(inputs))

    def _joined(self, replies: Sequence[DeviceReply]) -> DeviceReply:
        first = replies[0]
        for rank, reply in enumerate(replies):
            if reply.ok != first.ok:
                failed = reply if first.ok else first
                who = rank if first.ok else 0
                # Some ranks have other weights than others now, so nothing can be computed any
                # more.
                self._followers.lose(f"rank {who} refused what others have done: {failed.message}")
        if not first.ok:
            return first
        return replace(
            first,
            num_bytes=_num_bytes(replies),
            values=_joined_values([reply.values for reply in replies]),
        )


class LeaderDrafting(Pass):
    """On rank 0 with a draft model, which only rank 0 has."""

    name = "drafts of ranks"

    def __init__(self, sender: PlanSender) -> None:
        self._sender = sender

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.drafting is not None:
            # Its changes of the table of slots apply to all ranks, and are not repeated in later
            # plans.
            self._sender.begin(plan)
        return then(plan)


def of_follower(request: DeviceRequest, rank: int) -> DeviceRequest:
    """The request for a rank: all get the same, except that in a process group each has its own
    rank."""
    if isinstance(request, JoinGroup):
        return replace(request, rank=request.rank + rank)
    return request


def _num_bytes(replies: Sequence[DeviceReply]) -> int:
    """Memory that all ranks released together; of received content, all ranks read the same
    bytes."""
    if replies[0].num_tensors:
        return replies[0].num_bytes
    return sum(reply.num_bytes for reply in replies)


def _joined_values(values: Sequence[bytes]) -> bytes:
    """The values of all ranks joined; each rank has NaN for values that it does not have."""
    if not values[0]:
        return b""
    joined = np.frombuffer(values[0], np.float32).copy()
    for other in values[1:]:
        there = np.frombuffer(other, np.float32)
        joined = np.where(np.isnan(joined), there, joined)
    return joined.tobytes()
