"""Bodies of Anthropic's Messages API as structs. `null` means "not given" everywhere."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import CHAT_FIELDS, CachedTokensDetails
from weft.server.fields.cache_control import CacheControl
from weft.server.requests import GenerationFields


class ImageSource(msgspec.Struct, kw_only=True):
    """The location of an image's bytes. Blocks of refused types have sources of other types."""

    type: str
    media_type: str | None = None  # has no effect: the bytes determine the format
    data: str | None = None  # base64
    url: str | None = None
    file_id: str | None = None  # refused: uploaded files serve batches only


class Inner(msgspec.Struct, kw_only=True):
    """A content block in a result or a system prompt: text, an image, a search result, or a refused
    type."""

    type: str
    text: str | None = None
    source: str | ImageSource | None = None  # image; address of a search_result
    title: str | None = None  # search_result
    content: list[Inner] | None = None
    cache_control: CacheControl | None = None


class AnthropicBlock(msgspec.Struct, kw_only=True):
    """A content block of any type; `type` determines its fields."""

    type: str
    text: str | None = None  # text
    source: str | ImageSource | None = None  # image; address of a search_result
    title: str | None = None  # search_result
    thinking: str | None = None  # thinking
    signature: str | None = None  # the same text, in the form of `chat/sealed.py`
    id: str | None = None  # tool_use
    name: str | None = None
    input: Any = None  # an object; anything else does not end the conversation
    tool_use_id: str | None = None  # tool_result
    content: str | list[Inner] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None  # the prompt up to here stays cached


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class Tool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None  # passed to the template
    format: JsonObject | None = None


class CountRequest(GenerationFields, kw_only=True):
    """The fields of both routes; only some of them determine the prompt."""

    messages: list[AnthropicMessage]
    system: str | list[Inner] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None  # the earlier name of `output_config.format`
    stop_in_reasoning: bool | None = None  # true: stop strings also end the reasoning
    chat_template_kwargs: JsonObject | None = None  # vLLM's
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    cache_control: CacheControl | None = None  # marks the last block


class MessagesRequest(CountRequest, kw_only=True):
    refused: ClassVar[frozenset[str]] = CHAT_FIELDS

    max_tokens: int


class CacheCreation(msgspec.Struct, kw_only=True):
    """Tokens that were computed and pinned, by their time to live."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """The tokens of a prompt are divided into cached ones, computed and pinned ones, and all others
    (`input_tokens`)."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = msgspec.field(default_factory=CacheCreation)
    cached_tokens_details: CachedTokensDetails | msgspec.UnsetType = msgspec.UNSET
    cache_cause: JsonObject | msgspec.UnsetType | None = msgspec.UNSET  # if it was asked for


class MessageAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[JsonObject]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    input_tokens: int
