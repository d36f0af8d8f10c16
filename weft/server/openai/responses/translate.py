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
from weft.server.chat.models import ChatMessage, ContentPart, PlacedPart, TranslatedChat
from weft.server.chat.sealed import Opener
from weft.server.errors import ApiError
from weft.server.fields.sampling import require_one_answer
from weft.server.openai.responses.models import ResponseItem, ResponsePart, ResponsesRequest
from weft.server.openai.responses.tools import OfferedTools, visible_name
from weft.server.requests import copy_generation

LOGPROBS = "message.output_text.logprobs"  # in `include`
SEALED_REASONING = "reasoning.encrypted_content"  # in `include`
# What `include` may name. All others ask for parts of items that no answer has here, or that every
# answer has.
INCLUDED = (
    LOGPROBS,
    SEALED_REASONING,
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
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
) -> TranslatedChat:
    """`history`: the messages with the input of this request.

    `id` becomes the name of the request.
    """
    messages = list(history)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    request = TranslatedChat(messages=messages)
    require_one_answer(body.n)
    copy_generation(body, request)
    for name in _SAME:
        setattr(request, name, getattr(body, name))
    request.rid = id
    request.max_tokens = body.max_output_tokens
    request.tools = offered.tools
    request.tool_paths = offered.paths
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
        request.format_path = "text.format"
    has_media = any(isinstance(message.content, list) for message in messages)
    if body.truncation == "auto" and body.truncate_prompt_tokens is None and not has_media:
        request.truncate_prompt_tokens = -1
    return request


def check_include(include: Sequence[str] | None) -> None:
    """Raises ApiError for a name that the API does not have."""
    for index, name in enumerate(include or ()):
        if name not in INCLUDED:
            message = f"include has {name[:64]!r}; it may have {', '.join(INCLUDED)}"
            raise ApiError(400, message, param=f"include[{index}]")


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
    opener: Opener,
    history: Sequence[ChatMessage] = (),
    left_out: Counter[str] | None = None,
) -> list[ChatMessage]:
    """The history, and the input as messages.

    The items of one answer (reasoning, text, calls) become one message, as templates expect.
    Counts in `left_out` the items that no message has, by type.
    """
    left_out = Counter() if left_out is None else left_out
    if isinstance(request_input, str):
        return [*history, ChatMessage(role="user", content=request_input)]
    found = _GrowingMessages(history)
    for index, item in enumerate(request_input):
        where = f"input[{index}]"
        match item.type:
            case "message":
                if item.role is None:
                    raise ApiError(400, f"{where} has no role", param=f"{where}.role")
                content = _content(item.content, f"{where}.content")
                found.add_message(ChatMessage(role=item.role, content=content))
            case "function_call":
                found.add_call(item, item.arguments or "{}")
            case "custom_tool_call":
                found.add_call(item, arguments_of(item.input or ""))
            case "function_call_output" | "custom_tool_call_output":
                content = _content(_output(item), f"{where}.output")
                id = item.call_id or ""
                found.add(
                    ChatMessage(
                        role="tool",
                        tool_call_id=id,
                        content=content,
                    )
                )
            case "reasoning":
                text = _reasoning(item, where, opener)
                if text is None:
                    left_out["reasoning of another server"] += 1
                else:
                    found.add_reasoning(text)
            case kind if kind in HOSTED_ITEMS:
                left_out[kind] += 1
            case _:
                raise _unsupported(where, item.type)
    return found.messages()


class _GrowingMessages:
    """Messages, the last of which grows with the items of an answer.

    Its pieces are joined once, at its end, because an answer may have very many items.
    """

    def __init__(self, history: Sequence[ChatMessage]) -> None:
        self._messages = list(history)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[JsonObject] = []

    def messages(self) -> list[ChatMessage]:
        self._end_last()
        return self._messages

    def add(self, message: ChatMessage) -> None:
        self._end_last()
        self._messages.append(message)

    def add_message(self, message: ChatMessage) -> None:
        """The text of an answer belongs to the reasoning and the calls before it."""
        # Two texts without anything between them are two answers.
        is_more = message.role == "assistant" and self._has_open_answer() and self._has_begun()
        if is_more and isinstance(message.content, str):
            self._texts.append(message.content)
        else:
            self.add(message)

    def add_call(self, item: ResponseItem, arguments: str) -> None:
        name = visible_name(item.namespace, item.name or "")
        call = {
            "id": item.call_id or "",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        if not self._messages or self._messages[-1].role != "assistant":
            self.add(ChatMessage(role="assistant", content=""))
        self._calls.append(call)

    def add_reasoning(self, text: str) -> None:
        """To the answer before it, or as a message without content."""
        if not text:
            return
        if not self._has_open_answer():
            self.add(ChatMessage(role="assistant", content=""))
        self._thoughts.append(text)

    def _has_open_answer(self) -> bool:
        """Whether the last message is an answer to which other items may belong."""
        if not self._messages or self._messages[-1].role != "assistant":
            return False
        return isinstance(self._messages[-1].content, str)

    def _has_begun(self) -> bool:
        """Whether the last message has reasoning or calls."""
        last = self._messages[-1]
        before = last.reasoning_content or last.tool_calls
        return bool(before or self._thoughts or self._calls)

    def _end_last(self) -> None:
        """Give the last message its pieces. A message of the history is not changed itself."""
        if self._texts or self._thoughts or self._calls:
            last = self._messages[-1]
            content = last.content
            if isinstance(content, str):
                content = "".join([content, *self._texts])
            thoughts = "".join([last.reasoning_content or "", *self._thoughts])
            calls = [*(last.tool_calls or ()), *self._calls]
            self._messages[-1] = msgspec.structs.replace(
                last,
                content=content,
                reasoning_content=thoughts or None,
                tool_calls=calls or None,
            )
        self._texts = []
        self._thoughts = []
        self._calls = []


def warning_of(left_out: Counter[str]) -> tuple[str, ...]:
    """A warning about the items that were left out, if there are any."""
    if not left_out:
        return ()
    kinds = ", ".join(f"{number} x {kind}" for kind, number in left_out.items())
    return (f"items of the input that only their own server knows were left out: {kinds}",)


def _reasoning(item: ResponseItem, where: str, opener: Opener) -> str | None:
    """The text of reasoning, in the open or sealed; None if another server has sealed it."""
    text = _text(item.content, f"{where}.content")
    if text or not item.encrypted_content:
        return text
    return opener.opened(item.encrypted_content, f"{where}.encrypted_content")


def _output(item: ResponseItem) -> str | list[ResponsePart] | None:
    """The result of a call."""
    if not isinstance(item.output, dict):
        return item.output
    content = item.output.get("content")
    return content if isinstance(content, str) else msgspec.json.encode(item.output).decode()


def _unsupported(where: str, kind: str) -> ApiError:
    message = f"{where} is of type {kind[:64]!r}, which is not supported"
    return ApiError(400, message, param=where)


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
