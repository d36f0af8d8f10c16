"""Transcripts of models that hear and talk, such as Qwen2-Audio: a chat about the sound, with the
task in words."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

from starlette.requests import Request

from weft.server.chat.conversation import Conversation, start_chat
from weft.server.chat.models import AudioData, ChatMessage, ChatRequest, ContentPart, PlacedPart
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.openai.audio.models import SpeechForm, TokenUsage
from weft.text.parsers.events import AnswerText
from weft.text.speech.languages import NAMES, name_of
from weft.text.speech.vocabulary import TRANSLATE

TASK = "Write down what is said, word for word, and nothing else."
TRANSLATION = "Write down in English what is said, and nothing else."
FORMATS = ("json", "text")


async def begin_chat(
    context: ServerContext, request: Request, form: SpeechForm, raw: bytes
) -> Conversation:
    """Raises `ApiError` for what only models that write down speech can answer, and whatever a chat
    can raise."""
    if form.response_format not in FORMATS:
        message = (
            f"response_format is {form.response_format!r}, which has times; this model answers a "
            f"prompt about the sound: {' and '.join(FORMATS)} are allowed"
        )
        raise ApiError(400, message, param="response_format")
    sound = PlacedPart(
        type="input_audio",
        input_audio=AudioData(data=base64.b64encode(raw).decode("ascii")),
        where="file",
    )
    parts: list[ContentPart] = [sound, ContentPart(type="text", text=_instruction(form))]
    body = ChatRequest(
        messages=[ChatMessage(role="user", content=parts)],
        model=form.model,
        temperature=form.temperature or 0.0,
        stream=form.stream,
        user=form.user or None,
        priority=form.priority,
        service_tier=form.service_tier,
        timeout_ms=form.timeout_ms,
        ttft_ms=form.ttft_ms,
    )
    return await start_chat(context, request, body)


class ChatTranscript:
    """The answer of a chat, as the text of a transcript."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._num_input = 0
        self._num_output = 0

    async def texts(self) -> AsyncIterator[str]:
        """The text, as it comes. Raises `ApiError`."""
        conversation = self._conversation
        with conversation.generation as generation:
            async for deltas in generation:
                for delta in deltas:
                    for event in conversation.events(delta):
                        if isinstance(event, AnswerText) and event.text:
                            yield event.text
                    end = delta.end
                    if end is None:
                        continue
                    if end.status >= 400:
                        raise failed(end.status, end.message, end.retry_after_s)
                    self._num_input = end.prompt_tokens
                    self._num_output = end.completion_tokens

    def usage(self) -> TokenUsage:
        """After the last text."""
        return TokenUsage(
            input_tokens=self._num_input,
            output_tokens=self._num_output,
            total_tokens=self._num_input + self._num_output,
        )


def _instruction(form: SpeechForm) -> str:
    pieces = [TRANSLATION if form.task == TRANSLATE else TASK]
    if form.language:
        language = form.language if form.language in NAMES.values() else name_of(form.language)
        pieces.append(f"The language is {language}.")
    if form.prompt:
        pieces.append(f"This was said before: {form.prompt}")
    return " ".join(pieces)
