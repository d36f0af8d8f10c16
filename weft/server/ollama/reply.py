"""A generation as Ollama's answer: one object, or a stream with one object per piece and line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.messages.replies import Finish
from weft.server.causes import cause_of_prompts
from weft.server.chat.answers import chat_logprobs
from weft.server.chat.conversation import Conversation
from weft.server.context import ServerContext
from weft.server.errors import ApiError, ollama_error
from weft.server.openai.chat import answer_of, function_calls
from weft.server.stream import Wire
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, ReasoningText


def _error_line(error: ApiError) -> bytes:
    return ollama_error(error) + b"\n"


OLLAMA_LINES = Wire(b"application/x-ndjson", _error_line, b"")


class OllamaReply:
    """One answer of /api/chat or /api/generate.

    A call is sent only when it is complete: the API has no partial calls.
    """

    def __init__(
        self,
        context: ServerContext,
        conversation: Conversation,
        *,
        model: str,
        kind: Literal["chat", "generate"],
    ) -> None:
        self._model = model
        self._tokenizer = context.tokenizer
        self._conversation = conversation
        self._kind = kind
        self._began = time.perf_counter()
        self._name = ""  # name of the call whose arguments come next

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        [delta] = deltas
        assert delta.end is not None
        answer = answer_of(self._conversation.events(delta), 24)
        calls = [_call(one.function.name, one.function.arguments) for one in function_calls(answer)]
        fields = self._fields(answer.content or "", answer.reasoning_content or "", calls)
        fields |= self._logprobs(delta)
        fields |= self._end(delta.end)
        return msgspec.json.encode(fields)

    def events(self, delta: Delta) -> bytes:
        lines = []
        for found in self._conversation.events(delta):
            if isinstance(found, CallBegin):
                self._name = found.name
            else:
                lines.append(self._line(found))
        if delta.end is not None:
            lines.append(self._fields("") | self._end(delta.end))
        if self._conversation.params.logprobs is not None and delta.token_ids:
            if not lines:
                lines.append(self._fields(""))
            lines[0] |= self._logprobs(delta)
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def closing(self) -> bytes:
        return b""

    def _line(self, found: AnswerText | ReasoningText | CallArguments) -> JsonObject:
        match found:
            case AnswerText():
                return self._fields(found.text)
            case ReasoningText():
                return self._fields("", found.text)
            case CallArguments():
                return self._fields("", calls=[_call(self._name, found.text)])

    def _fields(
        self, text: str, thinking: str = "", calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        fields: JsonObject = {
            "model": self._model,
            "created_at": _now(),
            "done": False,
        }
        if self._kind == "generate":
            fields["response"] = text
            if thinking:
                fields["thinking"] = thinking
            return fields
        message: JsonObject = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        fields["message"] = message
        return fields

    def _logprobs(self, delta: Delta) -> JsonObject:
        """The log probabilities of the tokens of a delta, if requested.

        The API has one list, beside the text.
        """
        if self._conversation.params.logprobs is None:
            return {}
        return {"logprobs": chat_logprobs(self._tokenizer, delta).content}

    def _end(self, end: Finish) -> JsonObject:
        """The counts and times of the last object. Times are in nanoseconds."""
        total_s = time.perf_counter() - self._began
        first_at = self._conversation.generation.completions[0].first_token_at
        prompt_s = 0.0
        if first_at:
            prompt_s = max(first_at - self._began - end.queue_s, 0.0)
        completions = self._conversation.generation.completions
        cause: JsonObject = {}
        if self._conversation.request.tells_cause_to is not None:
            cause["cache_cause"] = cause_of_prompts(completions)
        return {
            "done": True,
            "done_reason": "stop" if end.reason == "abort" else end.reason,
            "total_duration": int(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": int(prompt_s * 1e9),
            "eval_count": end.completion_tokens,
            "eval_duration": int(max(total_s - prompt_s - end.queue_s, 0.0) * 1e9),
            **cause,
        }


def _call(name: str, arguments: str) -> JsonObject:
    """A call in Ollama's form: its arguments are an object."""
    return {"function": {"name": name, "arguments": msgspec.Raw(arguments.encode())}}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
