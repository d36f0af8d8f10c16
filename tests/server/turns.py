"""Conversations as clients of each API keep them: an answer becomes a part of the next request.

A client reads a whole answer or a stream, which it puts together as the official SDKs do, and sends
back what it got, with a result for each call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import httpx
from jiter import from_json

from tests.server.fake import MODEL

Body: TypeAlias = dict[str, Any]
RESULT = "wet"
MORE = "Go on"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("weather", "news")


class Client(NamedTuple):
    """One API, as one kind of client uses it."""

    name: str
    path: str
    first: Callable[[], Body]  # the first request
    read: Callable[[str, bool], Any]  # (text of the answer, streamed?) -> answer
    follow: Callable[[Body, Any], Body]  # (request, its answer) -> next request

    def ask(self, http: httpx.Client, body: Body, *, stream: bool, most: int) -> Any:
        """The answer to one request, after at most `most` tokens."""
        limit: Body = {"max_tokens": most}
        if self.path == "/v1/responses":
            limit = {"max_output_tokens": most}
        elif self.path == "/api/chat":
            limit = {"options": {"num_predict": most}}
        answer = http.post(self.path, json={**body, **limit, "stream": stream})
        assert answer.status_code == 200, (self.name, answer.text)
        return self.read(answer.text, stream)


def data_lines(text: str) -> Iterator[Any]:
    """The objects of a stream of server-sent events."""
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def functions() -> list[Body]:
    return [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
    ]


# ---- chat completions


def _chat_first() -> Body:
    user = {"role": "user", "content": "Hi"}
    return {"model": MODEL, "messages": [user], "tools": functions()}


def _read_chat(text: str, streamed: bool) -> Any:
    if not streamed:
        return json.loads(text)["choices"][0]["message"]
    message: Body = {"role": "assistant", "content": None}
    calls: dict[int, Body] = {}
    for chunk in data_lines(text):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
                for name in ("id", "type"):
                    if name in piece:
                        call[name] = piece[name]
                for name, value in piece["function"].items():
                    call["function"][name] += value
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def _follow_chat(body: Body, message: Any) -> Body:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        for call in message.get("tool_calls") or ()
    ]
    more = {"role": "user", "content": MORE}
    return {**body, "messages": [*body["messages"], message, *results, more]}


# ---- responses


def _response_first() -> Body:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
    return {"model": MODEL, "input": [{"role": "user", "content": "Hi"}], "tools": tools}


def _read_response(text: str, streamed: bool) -> Any:
    if not streamed:
        return json.loads(text)
    last = list(data_lines(text))[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    return last["response"]


def _response_news(response: Any) -> list[Body]:
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in response["output"]
        if item["type"] == "function_call"
    ]
    return [*results, {"role": "user", "content": MORE}]


def _follow_items(body: Body, response: Any) -> Body:
    items = [*body["input"], *response["output"], *_response_news(response)]
    return {**body, "input": items}


def _follow_id(body: Body, response: Any) -> Body:
    return {**body, "input": _response_news(response), "previous_response_id": response["id"]}


# ---- Anthropic's messages


def _messages_first() -> Body:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    user = {"role": "user", "content": "Hi"}
    return {"model": MODEL, "messages": [user], "tools": tools}


def _read_messages(text: str, streamed: bool) -> Any:
    if not streamed:
        return json.loads(text)["content"]
    blocks: list[Body] = []
    arguments = ""
    for event in data_lines(text):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                arguments += delta["partial_json"]
                if arguments:
                    blocks[-1]["input"] = from_json(arguments.encode(), partial_mode=True)
            else:
                blocks[-1][kind] += delta[kind]
    return blocks


def _follow_messages(body: Body, content: Any) -> Body:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in content
        if block["type"] == "tool_use"
    ]
    answer = {"role": "assistant", "content": content}
    more = {"role": "user", "content": [*results, {"type": "text", "text": MORE}]}
    return {**body, "messages": [*body["messages"], answer, more]}


# ---- Ollama


def _ollama_first() -> Body:
    user = {"role": "user", "content": "Hi"}
    return {"model": MODEL, "messages": [user], "tools": functions()}


def _read_ollama(text: str, streamed: bool) -> Any:
    if not streamed:
        return json.loads(text)["message"]
    message: Body = {"role": "assistant", "content": ""}
    for line in text.splitlines():
        piece = json.loads(line)["message"]
        message["content"] += piece["content"]
        if "thinking" in piece:
            message["thinking"] = message.get("thinking", "") + piece["thinking"]
        if "tool_calls" in piece:
            message["tool_calls"] = message.get("tool_calls", []) + piece["tool_calls"]
    return message


def _follow_ollama(body: Body, message: Any) -> Body:
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": RESULT}
        for call in message.get("tool_calls") or ()
    ]
    more = {"role": "user", "content": MORE}
    return {**body, "messages": [*body["messages"], message, *results, more]}


CHAT = Client("chat", "/v1/chat/completions", _chat_first, _read_chat, _follow_chat)
ITEMS = Client("items", "/v1/responses", _response_first, _read_response, _follow_items)
BY_ID = Client("by id", "/v1/responses", _response_first, _read_response, _follow_id)
MESSAGES = Client("messages", "/v1/messages", _messages_first, _read_messages, _follow_messages)
OLLAMA = Client("ollama", "/api/chat", _ollama_first, _read_ollama, _follow_ollama)
CLIENTS = (CHAT, ITEMS, BY_ID, MESSAGES, OLLAMA)
