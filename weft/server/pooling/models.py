"""Bodies of the APIs that answer with vectors or scores: OpenAI's, Jina's and Cohere's, vLLM's,
SGLang's, Ollama's.

`null` means "not given" everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import ChatMessage
from weft.server.ollama.models import TaggedModel

Side = Literal["left", "right"]
Texts = str | list[str | int | list[int]]  # one text, its ids, or a list of either


class PooledRequest(msgspec.Struct, kw_only=True):
    """The common fields of all these APIs."""

    model: str | None = None
    lora_path: str | None = None  # name of an adapter
    truncate_prompt_tokens: int | None = None  # tokens of an input to keep; -1: all that fit
    truncation_side: Side | None = None  # where tokens are dropped; default: right
    add_special_tokens: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None  # the engine of the request (`server/fields/engine.py`)
    data_parallel_rank: int | None = None  # the same
    priority: int | None = None
    service_tier: str | None = None
    rid: str | None = None
    request_id: str | None = None
    timeout_ms: int | None = None
    ttft_ms: int | None = None


class SeenInput(msgspec.Struct, kw_only=True):
    """A text with an image, a video or a sound: addresses, or base64 (SGLang)."""

    text: str | None = None
    image: str | None = None
    video: str | None = None
    audio: str | None = None


# Like `Texts`, or a list of texts with media.
EmbeddingInput = str | list[str | int | list[int] | SeenInput]


class EmbeddingRequest(PooledRequest, kw_only=True):
    """Either `input`, or `messages` for the model's chat template (vLLM)."""

    input: EmbeddingInput | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # needs --trust-request-chat-template
    chat_template_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    # For models that mark queries and documents; default: document.
    input_type: Literal["query", "document"] | None = None


class Document(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PooledRequest, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """Pairs of texts (vLLM), or a query with items and the label tokens that may follow them
    (SGLang)."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class ClassifyRequest(PooledRequest, kw_only=True):
    """`input` gets an answer in vLLM's form, `text` and `input_ids` in SGLang's."""

    input: Texts | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    use_activation: bool | None = None
    activation: bool | None = None


class EncodeRequest(PooledRequest, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    token_type_ids: list[int | list[int]] | None = None
    # An address, base64 or a list of these; for a list of inputs, a list with one entry per input.
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    dimensions: int | None = None


class OllamaEmbedRequest(TaggedModel, kw_only=True):
    input: str | list[str] | None = None
    truncate: bool | None = None  # default: true
    dimensions: int | None = None
    options: JsonObject | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(TaggedModel, kw_only=True):
    """The body of the older route, for one text."""

    prompt: str | None = None
    options: JsonObject | None = None
    keep_alive: Any = None
