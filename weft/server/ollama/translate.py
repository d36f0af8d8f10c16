"""Translates Ollama's requests to chat requests. Errors name a field that cannot be translated."""

from __future__ import annotations

from collections.abc import Sequence

from weft.json_types import JsonObject
from weft.server.chat.models import ChatMessage, ChatRequest, ContentPart, PlacedPart
from weft.server.errors import ApiError, not_supported
from weft.server.fields.arguments import arguments_text
from weft.server.fields.sampling import copy_sampling
from weft.server.ollama.models import (
    OllamaChatRequest,
    OllamaFunctionCall,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)


def chat_request(body: OllamaChatRequest) -> ChatRequest:
    messages = []
    for index, message in enumerate(body.messages):
        messages.append(_message(message, f"messages[{index}]"))
    return _sampled(ChatRequest(messages=messages, tools=body.tools), body)


def generate_request(
    body: OllamaGenerateRequest, ids: list[int] | None, stops: Sequence[int] = ()
) -> ChatRequest:
    """`ids`: token ids of a prompt without the chat template; `stops`: token ids that end its
    completion."""
    for name in ("template", "context"):
        if getattr(body, name):
            raise not_supported(name)
    if body.images and ids is not None:
        message = "images need the chat template: without raw and suffix"
        raise ApiError(400, message, param="images")
    content = _content(body.prompt, body.images, "images")
    messages = [ChatMessage(role="user", content=content)]
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=body.system))
    request = ChatRequest(messages=messages, input_ids=ids)
    request.stop_token_ids = list(stops) or None
    if ids is not None:
        request.separate_reasoning = False
    return _sampled(request, body)


def _content(text: str, images: list[str] | None, where: str) -> str | list[ContentPart]:
    """Images come before the text, as in Ollama."""
    if not images:
        return text
    parts: list[ContentPart] = []
    for number, data in enumerate(images):
        url = f"data:;base64,{data}"
        parts.append(PlacedPart(type="image_url", image_url=url, where=f"{where}[{number}]"))
    if text:
        parts.append(ContentPart(type="text", text=text))
    return parts


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    result = ChatMessage(
        role=message.role,
        content=_content(message.content or "", message.images, f"{where}.images"),
        reasoning_content=message.thinking,
    )
    if message.role == "tool":
        result.name = message.tool_name
    if message.tool_calls:
        result.tool_calls = [_call(call.function) for call in message.tool_calls]
    return result


def _call(function: OllamaFunctionCall) -> JsonObject:
    return {
        "id": "",
        "type": "function",
        "function": {"name": function.name, "arguments": arguments_text(function.arguments)},
    }


def _sampled(request: ChatRequest, body: OllamaRequest) -> ChatRequest:
    """`request` with the fields of `body` for sampling, reasoning and the form of the answer."""
    request.model = body.model
    request.stream = body.stream is not False
    request.logprobs = body.logprobs
    request.top_logprobs = body.top_logprobs
    request.mm_processor_kwargs = body.mm_processor_kwargs
    request.return_cache_cause = body.return_cache_cause
    if body.options is not None:
        copy_sampling(body.options, request)
        max_tokens = body.options.num_predict
        if max_tokens == 0:
            message = "num_predict is 0; at least 1 is allowed, or a number below 0 for no limit"
            raise ApiError(400, message, param="options.num_predict")
        if max_tokens is not None and max_tokens >= 0:
            request.max_tokens = max_tokens
    if body.think is not None:
        request.thinking = bool(body.think)
        if isinstance(body.think, str):
            request.reasoning_effort = body.think
    if body.format == "json":
        request.response_format = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "answer", "schema": body.format}
        request.response_format = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise not_supported(f"format {body.format[:64]!r}")
    return request
