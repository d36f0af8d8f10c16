"""Turns messages, and texts with images, into prompts of models that make vectors.

A conversation becomes one prompt by the model's chat template, as for a chat (vLLM); an input of a
text with images is a conversation of one message (SGLang).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.messages.media import MediaItem
from weft.server.chat.conversation import chat_prompt
from weft.server.chat.models import ChatMessage, ChatRequest, ContentPart, PlacedPart
from weft.server.context import ServerContext
from weft.server.errors import ApiError, over
from weft.server.pooling.inputs import cut_to_limit, require_lengths
from weft.server.pooling.models import EmbeddingRequest, SeenInput
from weft.text.tokenizer import Encoded

KINDS = ("image", "video", "audio")  # fields of `SeenInput`, and types of message parts


class PooledPrompts(NamedTuple):
    inputs: list[Encoded]
    media: list[tuple[MediaItem, ...]]  # of each input

    @property
    def all_media(self) -> list[MediaItem]:
        return [item for items in self.media for item in items]


async def from_messages(context: ServerContext, body: EmbeddingRequest) -> PooledPrompts:
    """The prompt of each conversation. Raises `ApiError`, `Busy` or `ContextExceeded`."""
    conversations, param = _conversations(body)
    most = context.limits.max_completions
    if len(conversations) > most:
        message = f"{param} has {len(conversations):,} inputs; {most:,} are allowed"
        raise over("max_completions", message, param=param)
    if context.template is None:
        message = (
            f"{param} needs a chat template, and this model has none; send texts as input, or "
            "start the server with --chat-template"
        )
        raise ApiError(400, message, param=param)
    found = PooledPrompts([], [])
    num_bytes = 0
    for messages in conversations:
        prompt = await chat_prompt(context, _as_chat(body, messages), num_bytes)
        num_bytes += sum(len(item.values) for item in prompt.media)
        ids = prompt.ids
        if not prompt.media:  # a cut could be inside an image
            ids = cut_to_limit(context, body, ids)
        found.inputs.append(Encoded(ids, []))
        found.media.append(prompt.media)
    require_lengths(context, found.inputs, param)
    return found


def _conversations(body: EmbeddingRequest) -> tuple[list[list[ChatMessage]], str]:
    """The messages of each prompt, and the name of their field."""
    if body.messages is not None:
        if body.input is not None:
            raise ApiError(400, "give either input or messages", param="input")
        return [body.messages], "messages"
    assert isinstance(body.input, list), "inputs with pictures are a list"
    conversations: list[list[ChatMessage]] = []
    for index, one in enumerate(body.input):
        if not isinstance(one, SeenInput):
            message = "input mixes texts with pictures and texts alone; write each as an object"
            raise ApiError(400, message, param="input")
        parts = _parts(one, f"input[{index}]")
        conversations.append([ChatMessage(role="user", content=parts)])
    return conversations, "input"


def _parts(one: SeenInput, where: str) -> list[ContentPart]:
    """The parts of a message: media come before the text."""
    parts: list[ContentPart] = []
    for kind in KINDS:
        value = getattr(one, kind)
        if value is not None:
            parts.append(PlacedPart(type=kind, where=f"{where}.{kind}", **{kind: value}))
    if one.text is not None:
        parts.append(ContentPart(type="text", text=one.text))
    if not parts:
        message = f"{where} is empty; text, {', '.join(KINDS)} are its fields"
        raise ApiError(400, message, param=where)
    return parts


def _as_chat(body: EmbeddingRequest, messages: Sequence[ChatMessage]) -> ChatRequest:
    return ChatRequest(
        messages=list(messages),
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
    )
