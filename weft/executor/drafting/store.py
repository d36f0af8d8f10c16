"""Weights and memory of a model and its draft model, as requests to the device find them.

Requests are about the model: updates and questions go to it alone, for drafts of a model with other
weights are merely less often right. Memory that is given back, or taken again, is that of both.
"""

from __future__ import annotations

from dataclasses import replace

from weft.executor.runner import DeviceStore
from weft.plan.device import DeviceReply, DeviceRequest, ReadAdapter, ReleaseMemory, ResumeMemory


class PairedStore:
    """The stores of both as one."""

    def __init__(self, store: DeviceStore, draft: DeviceStore) -> None:
        self.inner = store
        self._draft = draft
        self._released: frozenset[str] = frozenset()  # of the draft model

    def do(self, request: DeviceRequest) -> DeviceReply:
        """Carry it out. Raises nothing: what went wrong stands in the reply."""
        reply = self.inner.do(request)
        if isinstance(request, ReadAdapter):
            return reply  # beside a request that may just be releasing memory
        released = frozenset(reply.released)
        changes: list[DeviceRequest] = []
        if released - self._released:
            changes.append(ReleaseMemory(tuple(sorted(released - self._released))))
        if self._released - released:
            changes.append(ResumeMemory(tuple(sorted(self._released - released))))
        for change in changes:
            other = self._draft.do(change)
            self._released = frozenset(other.released)
            if not other.ok:
                message = f"the draft model: {other.message}"
                return replace(reply, ok=False, message=message, status=other.status)
            reply = replace(reply, num_bytes=reply.num_bytes + other.num_bytes)
        return reply
