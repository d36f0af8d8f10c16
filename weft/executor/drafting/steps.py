"""Steps of a draft model between those of the model.

A step of the draft model is always followed by one of the model, so that requests make progress
even if the drafts are wrong. `executor/heads/guessing.py` has its passes.
"""

from __future__ import annotations

from dataclasses import replace

from weft.executor.device import DeviceOutput, HostResult
from weft.executor.heads.guessing import GuessRunner
from weft.executor.runner import Do, Pass, Run
from weft.plan.device import DeviceReply, DeviceRequest, ReadAdapter, ReleaseMemory, ResumeMemory
from weft.plan.step import Plan, Result


class DraftPass(Pass):
    """Lets a draft model compute its plans.

    Both models use the same table of slots. The draft model has K and V in slots with the same
    numbers, and in those that plans name for its drafts.

    Requests are about the model: updates and questions go to it alone, because drafts of a model
    with other weights are only less often right. Memory that is released, or taken again, is that
    of both.
    """

    name = "draft model"

    def __init__(self, guesses: GuessRunner, draft: Do) -> None:
        """`draft` carries out a request to the draft model."""
        self._guesses = guesses
        self._draft = draft
        self._released: frozenset[str] = frozenset()  # of the draft model

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if plan.drafting is None:
            return then(plan)
        return HostResult(Result(self._guesses.guess(plan, plan.drafting)))

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        reply = then(request)
        if isinstance(request, ReadAdapter):
            return reply  # beside a request that may just be releasing memory
        released = frozenset(reply.released)
        changes: list[DeviceRequest] = []
        if released - self._released:
            changes.append(ReleaseMemory(tuple(sorted(released - self._released))))
        if self._released - released:
            changes.append(ResumeMemory(tuple(sorted(self._released - released))))
        for change in changes:
            other = self._draft(change)
            self._released = frozenset(other.released)
            if not other.ok:
                message = f"the draft model: {other.message}"
                return replace(reply, ok=False, message=message, status=other.status)
            reply = replace(reply, num_bytes=reply.num_bytes + other.num_bytes)
        return reply
