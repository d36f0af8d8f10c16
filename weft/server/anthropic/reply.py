"""A generation as Anthropic's answer: content blocks, complete or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.client.aux_outputs import cache_use
from weft.client.generation import Completion, Delta
from weft.json_types import JsonObject
from weft.messages.replies import Finish
from weft.server.anthropic.models import AnthropicUsage, CacheCreation, MessageAnswer
from weft.server.chat.answers import AnswerHeader, cached_details, pinned_by_ttl
from weft.server.chat.causes import cause_of_prompts
from weft.server.chat.conversation import Conversation
from weft.server.chat.sealed import sealed
from weft.server.chat.tools import call_id
from weft.server.errors import anthropic_error
from weft.server.fields.cache_control import TTL_S
from weft.server.stream import Wire
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.partial_json import completed_object

_ID_LEN = 24
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def sse(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


ANTHROPIC_EVENTS = Wire(
    b"text/event-stream; charset=utf-8",
    lambda error: b"event: error\ndata: " + anthropic_error(error) + b"\n\n",
    b"",
)


class MessagesReply:
    """One answer. A block is open until an event of another kind arrives."""

    def __init__(self, header: AnswerHeader, conversation: Conversation) -> None:
        self._header = header
        self._conversation = conversation
        self._num_blocks = 0
        self._open = ""  # type of the open block; "": none
        self._begun = False
        self._thoughts: list[str] = []  # texts of the open block of reasoning

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        [delta] = deltas
        assert delta.end is not None
        answer = self._message(delta.end)
        answer.content = _blocks(self._conversation.events(delta))
        answer.stop_reason, answer.stop_sequence = self._stop(delta)
        return msgspec.json.encode(answer)

    def events(self, delta: Delta) -> bytes:
        parts = []
        if not self._begun:
            self._begun = True
            parts.append(
                sse(
                    "message_start",
                    {
                        "type": "message_start",
                        "message": self._message(None),
                    },
                )
            )
        for found in self._conversation.events(delta):
            parts += self._event(found)
        if delta.end is not None:
            parts += self._close_block()
            reason, sequence = self._stop(delta)
            parts.append(
                sse(
                    "message_delta",
                    {
                        "type": "message_delta",
                        "delta": {"stop_reason": reason, "stop_sequence": sequence},
                        "usage": _usage(self._completion, delta.end),
                    },
                )
            )
        return b"".join(parts)

    def closing(self) -> bytes:
        return sse("message_stop", {"type": "message_stop"})

    def _event(self, found: Event) -> list[bytes]:
        match found:
            case AnswerText():
                parts = self._open_block("text", _text_block("text", ""))
                return [
                    *parts,
                    self._block_delta(
                        {
                            "type": "text_delta",
                            "text": found.text,
                        }
                    ),
                ]
            case ReasoningText():
                parts = self._open_block("thinking", _text_block("thinking", ""))
                self._thoughts.append(found.text)
                return [
                    *parts,
                    self._block_delta({"type": "thinking_delta", "thinking": found.text}),
                ]
            case CallBegin():
                parts = self._close_block()
                return [
                    *parts,
                    *self._open_block("tool_use", _tool_use(found.name)),
                ]
            case CallArguments():
                return [
                    self._block_delta(
                        {
                            "type": "input_json_delta",
                            "partial_json": found.text,
                        }
                    )
                ]

    def _open_block(self, kind: str, block: JsonObject) -> list[bytes]:
        if self._open == kind and kind != "tool_use":
            return []
        parts = self._close_block()
        self._open = kind
        start = {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": block,
        }
        return [*parts, sse("content_block_start", start)]

    def _close_block(self) -> list[bytes]:
        if not self._open:
            return []
        parts = []
        if self._open == "thinking":  # clients keep the block only with a signature
            signature = sealed("".join(self._thoughts))
            parts.append(self._block_delta({"type": "signature_delta", "signature": signature}))
            self._thoughts.clear()
        self._open = ""
        self._num_blocks += 1
        return [
            *parts,
            sse(
                "content_block_stop",
                {
                    "type": "content_block_stop",
                    "index": self._num_blocks - 1,
                },
            ),
        ]

    def _block_delta(self, delta: JsonObject) -> bytes:
        return sse(
            "content_block_delta",
            {
                "type": "content_block_delta",
                "index": self._num_blocks,
                "delta": delta,
            },
        )

    @property
    def _completion(self) -> Completion:
        [completion] = self._conversation.generation.completions
        return completion

    def _message(self, end: Finish | None) -> MessageAnswer:
        return MessageAnswer(
            id=self._header.id,
            model=self._header.model,
            content=[],
            usage=_usage(self._completion, end),
        )

    def _stop(self, delta: Delta) -> tuple[str, str | None]:
        """The stop reason, and the stop string if one matched."""
        assert delta.end is not None
        if isinstance(delta.end.matched, str):
            return "stop_sequence", delta.end.matched
        return _REASONS.get(self._conversation.finish_reason(delta), "end_turn"), None


def _blocks(events: Sequence[Event]) -> list[JsonObject]:
    """The events of a complete completion as blocks, in the order of a stream."""
    blocks: list[JsonObject] = []
    arguments: list[str] = []  # pieces of the last call

    def end_call() -> None:
        if arguments:
            # A call that was truncated has what is complete of its arguments.
            blocks[-1]["input"] = msgspec.Raw(completed_object("".join(arguments)).encode())
            arguments.clear()

    for found in events:
        if isinstance(found, CallArguments):
            arguments.append(found.text)
            continue
        end_call()
        if isinstance(found, CallBegin):
            blocks.append(_tool_use(found.name))
            continue
        kind = "thinking" if isinstance(found, ReasoningText) else "text"
        if blocks and blocks[-1]["type"] == kind:
            blocks[-1][kind] += found.text
        else:
            blocks.append(_text_block(kind, found.text))
    end_call()
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = sealed(block["thinking"])
    return blocks


def _text_block(kind: str, text: str) -> JsonObject:
    if kind == "thinking":
        return {"type": kind, "thinking": text, "signature": ""}
    return {"type": kind, "text": text}


def _tool_use(name: str) -> JsonObject:
    """A call without its arguments."""
    return {
        "type": "tool_use",
        "id": f"toolu_{call_id(_ID_LEN).removeprefix('call_')}",
        "name": name,
        "input": {},
    }


def _usage(completion: Completion, end: Finish | None) -> AnthropicUsage:
    """The usage. The number of cached tokens is unknown before the end."""
    spec = completion.spec
    if end is None:
        return AnthropicUsage(
            input_tokens=spec.prompt_len, cache_read_input_tokens=0, output_tokens=0
        )
    use = cache_use(completion.aux_outputs)
    created = pinned_by_ttl(spec.request.pins, use, end.cached_tokens)
    num_created = sum(created.values())
    usage = AnthropicUsage(
        input_tokens=end.prompt_tokens - end.cached_tokens - num_created,
        cache_read_input_tokens=end.cached_tokens,
        output_tokens=end.completion_tokens,
        cache_creation_input_tokens=num_created,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created.get(TTL_S["5m"], 0),
            ephemeral_1h_input_tokens=created.get(TTL_S["1h"], 0),
        ),
    )
    if spec.request.tells_cache:
        usage.cached_tokens_details = cached_details(use, end.cached_tokens)
    if spec.request.tells_cause_to is not None:
        usage.cache_cause = cause_of_prompts([completion])
    return usage
