"""Ollama's requests as chat requests. What cannot be translated is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.server.context import ServerContext
from weft.server.errors import not_supported
from weft.server.ollama.models import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
)
from weft.server.openai.models import ChatMessage, ChatRequest

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
)


def require_model(context: ServerContext, name: str | None) -> None:
    """Names may carry a tag; there is one version of the model here. Raises `ApiError` 404."""
    context.require_model(name.removesuffix(":latest") if name else name)


def chat_request(body: OllamaChatRequest) -> ChatRequest:
    request = ChatRequest(
        messages=[_message(message) for message in body.messages], tools=body.tools
    )
    return _sampled(request, body)


def generate_request(
    body: OllamaGenerateRequest, ids: list[int] | None, stops: Sequence[int] = ()
) -> ChatRequest:
    """`ids`: of a prompt that is not put into the chat template; `stops`: tokens that end its
    completion.
    """
    for name in ("images", "template", "context"):
        if getattr(body, name):
            raise not_supported(name)
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    request = ChatRequest(
        messages=[*system, ChatMessage(role="user", content=body.prompt)], input_ids=ids
    )
    request.stop_token_ids = list(stops) or None
    if ids is not None:
        request.separate_reasoning = False
    return _sampled(request, body)


def _message(message: OllamaMessage) -> ChatMessage:
    if message.images:
        raise not_supported("images")
    result = ChatMessage(
        role=message.role, content=message.content, reasoning_content=message.thinking
    )
    if message.role == "tool":
        result.name = message.tool_name
    if message.tool_calls:
        result.tool_calls = [
            _call(call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return result


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = msgspec.json.encode(arguments).decode()
    return {"id": "", "type": "function", "function": {"name": name, "arguments": text}}


def _sampled(request: ChatRequest, body: OllamaRequest) -> ChatRequest:
    options = body.options or Options()
    for name in _SAME:
        setattr(request, name, getattr(options, name))
    request.model = None  # looked at before, with its tag
    request.stream = body.stream is not False
    request.repetition_penalty = options.repeat_penalty
    request.logprobs = body.logprobs
    request.top_logprobs = body.top_logprobs
    if options.num_predict is not None and options.num_predict >= 0:
        request.max_tokens = options.num_predict
    if body.think is not None:
        request.thinking = bool(body.think)
        request.reasoning_effort = body.think if isinstance(body.think, str) else None
    if body.format == "json":
        request.response_format = {"type": "json_object"}
    elif isinstance(body.format, dict):
        request.response_format = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": body.format},
        }
    elif body.format:
        raise not_supported(f"format {body.format[:64]!r}")
    return request
