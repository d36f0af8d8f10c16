"""Bodies of the OpenAI API as structs: OpenAI's fields, and those of SGLang and vLLM, in both
spellings.

`null` means "not given" everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.tool_paths import ToolPath
from weft.server.fields.cache_control import CacheControl
from weft.server.fields.grammar import RESPONSE_FORMAT
from weft.server.fields.sampling import ThinkingSwitch
from weft.server.requests import SampledRequest

Detail = Literal["auto", "low", "high", "original"]


# The chat template knows which roles there are.
Role = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class MediaAddress(msgspec.Struct, kw_only=True):
    url: str  # data:, and, if the server allows them, http:, https: and file:
    detail: Detail | None = None  # has no effect: the model determines the sizes


class AudioData(msgspec.Struct, kw_only=True):
    data: str  # base64
    format: str | None = None  # has no effect: the bytes determine the format


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text, or an image, video or sound in the field that `type` names."""

    type: str
    text: str | None = None
    image_url: str | MediaAddress | None = None
    video_url: str | MediaAddress | None = None
    audio_url: str | MediaAddress | None = None
    input_audio: AudioData | None = None
    # Types of Hugging Face: an address, or base64.
    image: str | None = None
    video: str | None = None
    audio: str | None = None
    detail: Detail | None = None  # of input_image; has no effect
    cache_control: CacheControl | None = None  # the prompt up to here stays cached
    file_id: str | None = None  # refused: uploaded files serve batches only


class PlacedPart(ContentPart, kw_only=True):
    """A part of another API's body, where it has another position (`where`)."""

    where: str


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: CacheControl | None = None  # the prompt up to its end stays cached


class PredictedContent(msgspec.Struct, kw_only=True):
    """A text that the client expects the answer to resemble, for example a file that an editor
    changes."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatRequest(SampledRequest, kw_only=True):
    messages: list[ChatMessage]
    input_ids: list[int] | None = None  # the prompt itself: messages are not rendered
    max_completion_tokens: int | None = None  # overrides max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # passed to the template; "none": no reasoning
    thinking: bool | ThinkingSwitch | None = None
    separate_reasoning: bool | None = None  # false: reasoning stays in the content
    include_reasoning: bool | None = None  # false: reasoning is omitted
    stream_reasoning: bool | None = None  # false: reasoning is one event of a stream
    stop_in_reasoning: bool | None = None  # true: stop strings also end the reasoning
    chat_template: str | None = None  # needs --trust-request-chat-template
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    return_prompt_text: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None  # of SGLang's /generate
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: PredictedContent | None = None
    cache_control: CacheControl | None = None  # marks the last block


class TranslatedChat(ChatRequest, kw_only=True):
    """A chat request that was made from another API's body, where its tools and the form of its
    answer have other paths."""

    tool_paths: list[ToolPath] = msgspec.field(default_factory=list)
    format_path: str = RESPONSE_FORMAT


# Fields of chat requests, which APIs that translate to them serve, or refuse.
CHAT_FIELDS = frozenset(ChatRequest.__struct_fields__)


class CompletionRequest(SampledRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None  # text after a gap; `prompt` is the text before it
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class CachedTokensDetails(msgspec.Struct):
    """The locations of a prompt's cached tokens."""

    device: int  # in the KV pool
    host: int  # in the machine's main memory
    disk: int  # in the folder of --cache-dir


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int | msgspec.UnsetType = msgspec.UNSET  # computed and pinned
    cached_tokens_details: CachedTokensDetails | msgspec.UnsetType = msgspec.UNSET
    cache_cause: JsonObject | msgspec.UnsetType | None = msgspec.UNSET  # if it was asked for
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    video_tokens: int | msgspec.UnsetType = msgspec.UNSET
    audio_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET  # the same, at SGLang's place


class InputTokens(msgspec.Struct):
    """The number of tokens of a prompt, under the name that responses use."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]  # null for the first token of a prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int  # 1: no token is likelier
    decoded_token: str


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str  # a JSON object


class ToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class CustomInput(msgspec.Struct):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    id: str
    custom: CustomInput


class ChatAnswer(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET
    meta_info: JsonObject | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first delta of a function call has its id and name, the others pieces of its arguments.

    A custom tool's call is one delta.
    """

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomInput | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    meta_info: JsonObject | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET  # None: it comes with the last chunk
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A text completion, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["weft"] = "weft"
    root: str
    parent: str | None = None
    max_model_len: int
    task: str = "generate"  # generate, embed or classify
    type: Literal["model"] = "model"  # from here on: fields for Anthropic's clients
    display_name: str
    created_at: str  # RFC 3339


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[JsonObject]  # the same, with what coding agents read (`agents.py`)
    first_id: str
    last_id: str
    has_more: bool = False
