"""`service_tier`: flex makes a background request in each API that generates or embeds."""

from __future__ import annotations

import httpx
import pytest

from tests.server.fake import running

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {**CHAT, "max_tokens": 1},
    "/v1/messages": {**CHAT, "model": "tiny/byte-model", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize("path", BODIES)
def test_flex_makes_a_background_request(path: str) -> None:
    with running() as server:
        for tier in (None, "auto", "default", "flex"):
            body = {**BODIES[path], "service_tier": tier}
            answer = httpx.post(f"{server.url}{path}", json=body)
            assert answer.status_code == 200, answer.text
        assert [one.background for one in server.engine.seen] == [False, False, False, True]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_tier_is_refused_by_name(path: str) -> None:
    with running() as server:
        answer = httpx.post(f"{server.url}{path}", json={**BODIES[path], "service_tier": "best"})
        assert answer.status_code == 400
        assert "service_tier is 'best'" in answer.text
        assert "flex" in answer.text
        assert not server.engine.seen
