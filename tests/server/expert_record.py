"""A fake engine whose model has experts, for tests of what is counted of them."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.server.fake import READY, RunningServer
from weft.messages import control
from weft.messages.codec import ToEngine


class Recording:
    """Answers in the place of the fake engine of `server`; `has_experts`: as one whose model has
    them."""

    def __init__(self, server: RunningServer) -> None:
        self._engine = server.engine
        self._send = server.engine.send
        self.has_experts = True
        self.is_on = False
        server.call(lambda: server.client.deliver(msgspec.structs.replace(READY, has_experts=True)))
        server.engine.send = self  # type: ignore[method-assign]

    def __call__(self, message: ToEngine) -> None:
        reply = self._reply(message)
        if reply is None:
            self._send(message)
        else:
            self._engine.answer(reply)

    def _reply(self, message: ToEngine) -> Any:
        refusal = {"success": False, "status": 400, "message": "nano has no experts"}
        match message:
            case control.StartExpertDistributionRecord(call=call):
                how: Any = {"success": True} if self.has_experts else refusal
                self.is_on = self.has_experts
                return control.ExpertRecordReply(call=call, **how)
            case control.StopExpertDistributionRecord(call=call):
                self.is_on = False
                return control.ExpertRecordReply(call=call, success=True)
            case control.GetExpertDistributionRecord(call=call):
                if not self.has_experts:
                    return control.ExpertDistributionReply(call=call, **refusal)
                return self._counts(call)
            case control.DumpExpertDistributionRecord(call=call):
                return msgspec.structs.replace(
                    self._counts(call),
                    file="expert-distribution-0001.json",
                )
        return None

    def _counts(self, call: int) -> control.ExpertDistributionReply:
        return control.ExpertDistributionReply(
            call=call,
            success=True,
            layers=[1],
            prefill=[[4, 0, 2]],
            decode=[[0, 1, 1]],
            is_recording=self.is_on,
        )
