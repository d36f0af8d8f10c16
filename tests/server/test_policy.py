"""The route that switches the policy."""

from __future__ import annotations

import httpx
import pytest

from tests.server.fake import RunningServer
from weft.messages.control import SetPolicy, SetPolicyReply


def test_the_policy_is_switched_and_a_wrong_name_is_answered_with_the_right_ones(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(message: SetPolicy) -> SetPolicyReply:
        if message.policy == "lpm":
            return SetPolicyReply(success=True, before="fcfs")
        return SetPolicyReply(success=False, before="fcfs", message="there are fcfs, lpm")

    monkeypatch.setattr(server.engine, "reply", reply)
    assert http.post("/set_policy", json={"policy": "lpm"}).json() == {
        "policy": "lpm",
        "before": "fcfs",
    }
    answer = http.post("/set_policy", json={"policy": "magic"})
    assert answer.status_code == 400
    assert "fcfs, lpm" in answer.text
    assert http.post("/set_policy", json={}).status_code == 400
