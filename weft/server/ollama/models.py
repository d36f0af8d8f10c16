"""Bodies of Ollama's API as structs. `null` means "not given" everywhere."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.json_types import JsonObject
from weft.server.chat.models import Role


class Options(msgspec.Struct, kw_only=True):
    """Sampling parameters under llama.cpp's names.

    Options about memory and threads are not supported per request.
    """

    num_predict: int | None = None  # negative: as many as the context allows
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class TaggedModel(msgspec.Struct, kw_only=True):
    """A body that names a model, perhaps with the tag `:latest`: there is no other version."""

    model: str | None = None

    def __post_init__(self) -> None:
        if self.model:
            self.model = self.model.removesuffix(":latest")


class OllamaRequest(TaggedModel, kw_only=True):
    """The common fields of both generating routes."""

    stream: bool | None = None  # default: true
    format: str | JsonObject | None = None
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    mm_processor_kwargs: JsonObject | None = None  # sizes of images (vLLM)
    return_cache_cause: bool | None = None  # why not more of the prompt was cached


class OllamaFunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = None  # an object; anything else does not end the conversation


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: OllamaFunctionCall


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Role
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] = []
    tools: list[JsonObject] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None  # without the chat template
    suffix: str | None = None
    images: list[str] | None = None
    template: str | None = None
    context: list[int] | None = None


class NamedInCatalog(msgspec.Struct, kw_only=True):
    """A body that names a model on this machine, served or not."""

    target: str | None = msgspec.field(name="model", default=None)
    name: str | None = None  # of the model, in older clients

    def __post_init__(self) -> None:
        self.target = (self.target or self.name or "").removesuffix(":latest") or None


class OllamaShowRequest(NamedInCatalog, kw_only=True):
    verbose: bool | None = None  # read, and without effect: all is shown


class OllamaPullRequest(NamedInCatalog, kw_only=True):
    stream: bool | None = None  # default: true
    insecure: bool | None = None  # read, and without effect


class OllamaDeleteRequest(NamedInCatalog, kw_only=True):
    pass


class OllamaCopyRequest(msgspec.Struct, kw_only=True):
    source: str | None = None
    destination: str | None = None
