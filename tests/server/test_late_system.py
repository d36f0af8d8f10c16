"""System messages behind the user's, as coding agents send them, where the template refuses
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, running
from tests.server.scripted import record_prompts
from tests.text.late_system import BLOCK, STRICT
from tests.text.tokens import byte_backend
from weft.config.server import ServerConfig
from weft.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
LATE = {"role": "system", "content": "It is late."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER, LATE]},
    "/v1/messages": {"max_tokens": 9, "messages": [USER, LATE]},
    "/v1/responses": {"input": [USER, {**LATE, "role": "developer"}]},
    "/api/chat": {"messages": [USER, LATE]},
}


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    tokenizer = Tokenizer(byte_backend(), {}, {"default": STRICT})
    with running(ServerConfig(drain_s=1.0), tokenizer=tokenizer) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_it_keeps_its_place_and_a_warning_names_it(
    strict: RunningServer, path: str, stream: bool
) -> None:
    strict.reset()
    prompts = record_prompts(strict, "Hello.")
    body = BODIES[path] | {"stream": stream}
    answer = httpx.post(strict.url + path, json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    assert f"user\nHi\n{BLOCK}" in prompts[0]
    warnings = answer.headers["x-weft-warnings"]
    assert "message 2 of the prompt is a system message behind others" in warnings
