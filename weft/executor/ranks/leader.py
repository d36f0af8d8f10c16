"""Rank 0, which decides: it runs the steps, and lets all other ranks run the same.

    plan ─▶ LeaderSteps ─▶ plan without sampling ─▶ followers
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
from weft.executor.runner import DeviceStore, ModelSteps
from weft.executor.wire.followers import READ, REQUEST, Followers
from weft.executor.wire.pack import pack
from weft.ops.sharding import RankLost
from weft.plan.device import DeviceReply, DeviceRequest, JoinGroup, ReadAdapter, RecordExperts
from weft.plan.inputs import InputOp, InputVectors, MediaVectors
from weft.plan.step import Plan, find


class LeaderSteps:
    """The `ModelSteps` of rank 0; `steps` are its own part."""

    def __init__(self, steps: ModelSteps, sender: PlanSender) -> None:
        self._steps = steps
        self.sender = sender

    def run(self, plan: Plan) -> DeviceOutput:
        plan = self._encoded(plan)
        self.sender.begin(plan)
        try:
            return self._steps.run(plan)
        except RankLost as exc:
            raise self.sender.followers.explain(exc) from exc

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


class LeaderDrafting:
    """Steps of rank 0 with a draft model, which only rank 0 has."""

    def __init__(self, steps: ModelSteps, sender: PlanSender) -> None:
        self._steps = steps
        self._sender = sender

    def run(self, plan: Plan) -> DeviceOutput:
        if plan.drafting is not None:
            # Its changes of the table of slots apply to all ranks, and are not repeated in later
            # plans.
            self._sender.begin(plan)
        return self._steps.run(plan)


class LeaderStore:
    """The `DeviceStore` of rank 0: every rank carries out each request, and the replies are
    joined."""

    def __init__(self, store: DeviceStore, followers: Followers, *, is_staged: bool) -> None:
        """`is_staged`: each rank has some of the layers."""
        self.inner = store
        self._is_staged = is_staged
        self._followers = followers

    def do(self, request: DeviceRequest) -> DeviceReply:
        if isinstance(request, RecordExperts) and self._is_staged:
            return DeviceReply(
                ok=False, message="experts are not counted with --pp-size: no rank sees all layers"
            )
        if isinstance(request, RecordExperts):
            return self.inner.do(request)  # all ranks choose the same experts
        if isinstance(request, ReadAdapter):
            # While steps run, so not on their thread. A rank that cannot read the adapter reports
            # it when the adapter is loaded.
            self._followers.note(READ, pack(request))
            return self.inner.do(request)
        try:
            self._followers.tell(REQUEST, pack(request))
            mine = self.inner.do(request)
            return self._joined([mine, *self._followers.replies()])
        except RankLost as exc:
            return DeviceReply(ok=False, message=str(exc), status=500)

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
