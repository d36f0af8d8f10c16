"""Bodies that no client should send, to every API: refused in the API's own form, never a fault of
ours."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, as_bytes

USER = {"role": "user", "content": "Hi"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": [USER], "max_output_tokens": 3},
    "/api/chat": {"messages": [USER], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 3}},
    "/api/show": {},
}
DEEP = "[" * 20_000 + "]" * 20_000
NESTED: Any = None
for _ in range(100):
    NESTED = {"a": NESTED}
FUNCTION = {"name": "f", "description": 7, "parameters": {"type": 5, "properties": []}}
ODD: list[dict[str, Any]] = [
    {"messages": []},
    {"input": []},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text"}, {"type": "tool_result"}, {"type": "x"}]}
        ]
    },
    {"input": [{"type": "function_call"}, {"type": "function_call_output"}, {"type": "reasoning"}]},
    {
        "messages": [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
            }
        ]
    },
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"input": [{"type": "function_call", "arguments": "["}]},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "function", "name": 5}]},
    {"tools": [{"name": "f", "input_schema": NESTED}]},
    {"tools": [{}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]},
    {"tool_choice": {"type": "function"}},
    {"tool_choice": {"type": "tool"}},
    {"tool_choice": 7},
    {"chat_template_kwargs": {"messages": []}},
    {"system": [{"type": "image"}]},
    {"thinking": {"type": "enabled", "budget_tokens": -1}},
    {"text": {"format": {"type": "json_schema"}}},
    {"output_config": {"format": {"type": "json_schema"}}},
    {"format": {"type": 5}},
    {"format": "xml"},
    {"options": {"temperature": 1e30}},
    {"think": "much"},
    {"previous_response_id": "x" * 10_000},
    {"metadata": {"a": NESTED}},
    {"prompt": "\ud800", "raw": True},
]


@pytest.mark.parametrize("path", GOOD)
def test_odd_bodies_never_end_in_a_fault(tool_server: RunningServer, path: str) -> None:
    tool_server.engine.script = lambda ids: as_bytes(
        '<tool_call>{"name": "f", "arguments": {"a": ['
    )
    with httpx.Client(base_url=tool_server.url, timeout=HANG_S) as http:
        for odd in ODD:
            for stream in (False, True):
                body = json.dumps({**GOOD[path], "stream": stream, **odd}).encode()
                answer = http.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code < 500, (odd, answer.text)
        for broken in (
            b"",
            b"[]",
            b'{"model": ' + DEEP.encode() + b"}",
        ):
            answer = http.post(path, content=broken, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            error = answer.json()["error"]
            if path.startswith("/v1/messages"):
                assert answer.json()["type"] == "error"
                assert error["type"] == "invalid_request_error"
            else:
                assert isinstance(error, str if path.startswith("/api/") else dict)
        assert http.post(path, json=GOOD[path]).status_code == 200
