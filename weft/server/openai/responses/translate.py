"""The input of the Responses API as a chat request.

What cannot be translated is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.server.errors import ApiError
from weft.server.openai.custom_tools import arguments_of
from weft.server.openai.models import ChatMessage, ChatRequest
from weft.server.openai.responses.models import ResponseItem, ResponsePart, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"  # in `include`
_SAME = (  # fields that mean the same in both
    *(
        "model",
        "stream",
        "user",
        "tool_choice",
        "parallel_tool_calls",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "priority", "cache_salt", "chat_template_kwargs"),
)


def chat_request(body: ResponsesRequest, history: Sequence[ChatMessage], id: str) -> ChatRequest:
    """`history`: what was said before the input of this request.

    `id` becomes the name of the request.
    """
    instructions = (
        [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    )
    request = ChatRequest(messages=[*instructions, *history])
    for name in _SAME:
        setattr(request, name, getattr(body, name))
    request.rid = id
    request.max_tokens = body.max_output_tokens
    request.tools = (
        None
        if body.tools is None
        else [_tool(tool, place) for place, tool in enumerate(body.tools)]
    )
    request.logprobs = wants_logprobs(body)
    request.top_logprobs = body.top_logprobs
    if body.reasoning is not None:
        request.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        request.response_format = _response_format(body.text.format)
    return request


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the log probabilities of the text are asked for, in either of the two ways."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def messages(given: str | list[ResponseItem]) -> list[ChatMessage]:
    """The input as messages.

    Calls that follow each other are one message, as templates want them.
    """
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    found: list[ChatMessage] = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        match item.type:
            case "message":
                if item.role is None:
                    raise ApiError(400, f"{where} has no role", param=f"{where}.role")
                found.append(
                    ChatMessage(role=item.role, content=_text(item.content, f"{where}.content"))
                )
            case "function_call":
                _add_call(found, item, item.arguments or "{}")
            case "custom_tool_call":
                _add_call(found, item, arguments_of(item.input or ""))
            case "function_call_output" | "custom_tool_call_output":
                text = _text(item.output, f"{where}.output")
                found.append(
                    ChatMessage(role="tool", tool_call_id=item.call_id or "", content=text)
                )
            case "reasoning":
                _add_reasoning(found, _text(item.content, f"{where}.content"))
            case _:
                raise ApiError(
                    400,
                    f"{where} is of type {item.type[:64]!r}, which is not supported",
                    param=where,
                )
    return found


def _add_call(found: list[ChatMessage], item: ResponseItem, arguments: str) -> None:
    call = {
        "id": item.call_id or "",
        "type": "function",
        "function": {"name": item.name or "", "arguments": arguments},
    }
    if not found or found[-1].role != "assistant":
        found.append(ChatMessage(role="assistant", content=""))
    found[-1] = msgspec.structs.replace(found[-1], tool_calls=[*(found[-1].tool_calls or ()), call])


def _add_reasoning(found: list[ChatMessage], text: str) -> None:
    """Reasoning belongs to what follows; as long as nothing does, it is a message without content."""
    if text:
        found.append(ChatMessage(role="assistant", content="", reasoning_content=text))


def _text(content: str | list[ResponsePart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in (
            "input_text",
            "output_text",
            "text",
            "reasoning_text",
            "summary_text",
            "refusal",
        ):
            place = f"{where}[{number}]"
            raise ApiError(
                400, f"{place} is of type {part.type[:64]!r}, which is not supported", param=place
            )
    return "\n".join(part.text or "" for part in content)


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    """A tool here has its name beside its type; in chat requests it has an object of its own."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        message = f"tools[{place}] is of type {str(kind)[:64]!r}; functions and custom tools are supported"
        raise ApiError(400, message, param="tools")
    if kind in tool:
        return tool
    return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    """`{"type": "json_schema", "schema": ...}` is one level deeper in chat requests."""
    if format.get("type") != "json_schema":
        return format
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in format.items() if key != "type"},
    }
