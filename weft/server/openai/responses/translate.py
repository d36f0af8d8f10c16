"""Translates requests of the Responses API to chat requests.

Errors name a part that cannot be translated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from weft.json_types import JsonObject
from weft.messages.sampling import InvalidParam
from weft.server.chat.agents import HOSTED_ITEMS
from weft.server.chat.custom_tools import arguments_of
from weft.server.chat.models import ChatMessage, ChatRequest, ContentPart, PlacedPart
from weft.server.chat.sealed import opened
from weft.server.errors import ApiError
from weft.server.fields.sampling import require_one_answer
from weft.server.openai.responses.models import ResponseItem, ResponsePart, ResponsesRequest
from weft.server.openai.responses.tools import OfferedTools, visible_name
from weft.server.requests import copy_generation

LOGPROBS = "message.output_text.logprobs"  # in `include`
SEALED_REASONING = "reasoning.encrypted_content"  # in `include`
_SAME = (  # further fields with the same meaning in both
    "parallel_tool_calls",
    "stop_in_reasoning",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


def chat_request(
    body: ResponsesRequest,
    history: Sequence[ChatMessage],
    offered: OfferedTools,
    id: str,
) -> ChatRequest:
    """`history`: the messages with the input of this request.

    `id` becomes the name of the request.
    """
    messages = list(history)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    request = ChatRequest(messages=messages)
    require_one_answer(body.n)
    copy_generation(body, request)
    for name in _SAME:
        setattr(request, name, getattr(body, name))
    request.rid = id
    request.max_tokens = body.max_output_tokens
    request.tools = offered.tools
    request.tool_choice = offered.choice
    request.logprobs = wants_logprobs(body)
    request.top_logprobs = body.top_logprobs
    if body.reasoning is not None:
        request.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        if body.response_format is not None:
            message = "text.format and response_format are the same; give one of them"
            raise ApiError(400, message, param="response_format")
        request.response_format = _response_format(body.text.format)
    has_media = any(isinstance(message.content, list) for message in messages)
    if body.truncation == "auto" and body.truncate_prompt_tokens is None and not has_media:
        request.truncate_prompt_tokens = -1
    return request


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether log probabilities of the text are requested, in either of two ways."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


@contextmanager
def errors_name_input() -> Iterator[None]:
    """Errors about the messages name the field that they come from."""
    try:
        yield
    except (ApiError, InvalidParam) as exc:
        if exc.param is not None and exc.param.partition("[")[0] == "messages":
            exc.param = "input"
        raise


def output_items(response: JsonObject) -> list[ResponseItem]:
    """The output of a response, as the input of a later request has it."""
    return msgspec.convert(response["output"], list[ResponseItem])


def messages(
    request_input: str | list[ResponseItem],
    history: Sequence[ChatMessage] = (),
    left_out: Counter[str] | None = None,
) -> list[ChatMessage]:
    """The history, and the input as messages.

    The items of one answer (reasoning, text, calls) become one message, as templates expect.
    Counts in `left_out` the items that no message has, by type.
    """
    left_out = Counter() if left_out is None else left_out
    found = list(history)
    if isinstance(request_input, str):
        return [*found, ChatMessage(role="user", content=request_input)]
    for index, item in enumerate(request_input):
        where = f"input[{index}]"
        match item.type:
            case "message":
                if item.role is None:
                    raise ApiError(400, f"{where} has no role", param=f"{where}.role")
                content = _content(item.content, f"{where}.content")
                _add_message(found, ChatMessage(role=item.role, content=content))
            case "function_call":
                _add_call(found, item, item.arguments or "{}")
            case "custom_tool_call":
                _add_call(found, item, arguments_of(item.input or ""))
            case "function_call_output" | "custom_tool_call_output":
                content = _content(_output(item), f"{where}.output")
                id = item.call_id or ""
                found.append(
                    ChatMessage(
                        role="tool",
                        tool_call_id=id,
                        content=content,
                    )
                )
            case "reasoning":
                text = _reasoning(item, f"{where}.content")
                if text is None:
                    left_out["reasoning of another server"] += 1
                else:
                    _add_reasoning(found, text)
            case kind if kind in HOSTED_ITEMS:
                left_out[kind] += 1
            case _:
                raise _unsupported(where, item.type)
    return found


def warning_of(left_out: Counter[str]) -> tuple[str, ...]:
    """A warning about the items that were left out, if there are any."""
    if not left_out:
        return ()
    kinds = ", ".join(f"{number} x {kind}" for kind, number in left_out.items())
    return (f"items of the input that only their own server knows were left out: {kinds}",)


def _reasoning(item: ResponseItem, where: str) -> str | None:
    """The text of reasoning, in the open or sealed; None if another server has sealed it."""
    text = _text(item.content, where)
    if text or not item.encrypted_content:
        return text
    return opened(item.encrypted_content)


def _output(item: ResponseItem) -> str | list[ResponsePart] | None:
    """The result of a call."""
    if not isinstance(item.output, dict):
        return item.output
    content = item.output.get("content")
    return content if isinstance(content, str) else msgspec.json.encode(item.output).decode()


def _unsupported(where: str, kind: str) -> ApiError:
    message = f"{where} is of type {kind[:64]!r}, which is not supported"
    return ApiError(400, message, param=where)


def _add_message(found: list[ChatMessage], message: ChatMessage) -> None:
    """Add a message. The text of an answer belongs to the reasoning and the calls before it."""
    before = _open_answer(found)
    is_text = message.role == "assistant" and isinstance(message.content, str)
    # Two texts without anything between them are two answers.
    if is_text and before is not None and (before.reasoning_content or before.tool_calls):
        content = f"{before.content}{message.content}"
        found[-1] = msgspec.structs.replace(before, content=content)
    else:
        found.append(message)


def _open_answer(found: Sequence[ChatMessage]) -> ChatMessage | None:
    """The last message, if it is an answer to which other items may belong."""
    if not found or found[-1].role != "assistant" or not isinstance(found[-1].content, str):
        return None
    return found[-1]


def _add_call(found: list[ChatMessage], item: ResponseItem, arguments: str) -> None:
    call = {
        "id": item.call_id or "",
        "type": "function",
        "function": {"name": visible_name(item.namespace, item.name or ""), "arguments": arguments},
    }
    if not found or found[-1].role != "assistant":
        found.append(ChatMessage(role="assistant", content=""))
    answer = found[-1]
    calls = list(answer.tool_calls or ())
    calls.append(call)
    found[-1] = msgspec.structs.replace(answer, tool_calls=calls)


def _add_reasoning(found: list[ChatMessage], text: str) -> None:
    """Add reasoning to the answer before it, or as a message without content."""
    if not text:
        return
    before = _open_answer(found)
    if before is not None:
        reasoning = f"{before.reasoning_content or ''}{text}"
        found[-1] = msgspec.structs.replace(before, reasoning_content=reasoning)
    else:
        found.append(
            ChatMessage(
                role="assistant",
                content="",
                reasoning_content=text,
            )
        )


_TEXTS = frozenset(
    {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}
)


_MEDIA = frozenset({"input_image", "input_audio"})


def _content(content: str | list[ResponsePart] | None, where: str) -> str | list[ContentPart]:
    """Parts that are only texts become the lines of one text."""
    if not isinstance(content, list) or not any(part.type in _MEDIA for part in content):
        return _text(content, where)
    parts: list[ContentPart] = []
    for number, part in enumerate(content):
        if part.type in _MEDIA:
            one: ContentPart = PlacedPart(
                type=part.type,
                image_url=part.image_url,
                input_audio=part.input_audio,
                file_id=part.file_id,
                where=f"{where}[{number}]",
            )
        elif part.type in _TEXTS:
            one = ContentPart(type="text", text=part.text or "")
        else:
            raise _unsupported(f"{where}[{number}]", part.type)
        parts.append(one)
    return parts


def _text(content: str | list[ResponsePart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise _unsupported(f"{where}[{number}]", part.type)
    return "\n".join(part.text or "" for part in content)


def _response_format(format: JsonObject) -> JsonObject:
    """`{"type": "json_schema", "schema": ...}` is one level deeper in chat requests."""
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": _without_type(format)}


def _without_type(fields: JsonObject) -> JsonObject:
    return {key: value for key, value in fields.items() if key != "type"}
