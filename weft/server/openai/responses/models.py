"""Bodies of OpenAI's Responses API as structs. `null` means "not given" everywhere."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import CHAT_FIELDS, AudioData, Detail, Role
from weft.server.requests import GenerationFields


class ResponsePart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: str | None = None  # input_image
    detail: Detail | None = None  # of input_image; has no effect
    file_id: str | None = None  # refused: uploaded files serve batches only
    input_audio: AudioData | None = None


class ResponseItem(msgspec.Struct, kw_only=True):
    """An input item of any type; the default is a message."""

    type: str = "message"
    id: str | None = None
    role: Role | None = None
    content: str | list[ResponsePart] | None = None
    name: str | None = None  # function_call
    namespace: str | None = None  # of the called tool
    arguments: str | None = None
    call_id: str | None = None
    input: str | None = None  # custom_tool_call
    # Of function_call_output and custom_tool_call_output. Early clients sent {"content": text}.
    output: str | list[ResponsePart] | JsonObject | None = None
    encrypted_content: str | None = None  # reasoning, in the form of `chat/sealed.py`


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: JsonObject | None = None
    verbosity: str | None = None


class ObfuscationOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of responses."""

    include_obfuscation: bool | None = None  # has no effect: events are not padded


class ResponsesRequest(GenerationFields, kw_only=True):
    refused: ClassVar[frozenset[str]] = CHAT_FIELDS | {"prompt"}

    items: str | list[ResponseItem] = msgspec.field(name="input")
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ObfuscationOptions | None = None
    metadata: dict[str, str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # has no effect: no tools run on the server
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    stop_in_reasoning: bool | None = None  # true: stop strings also end the reasoning
    chat_template: str | None = None  # needs --trust-request-chat-template
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)


class ResponseItemList(msgspec.Struct, kw_only=True):
    """Input items of a response, in the requested order."""

    object: Literal["list"] = "list"
    data: list[JsonObject]
    first_id: str | None  # null if there is no item
    last_id: str | None
    has_more: bool
