"""A generation as a response: items of output, whole or as typed events.

The same events make both: the object of the response grows with them, and what is told of it in a stream is written
down beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.server.errors import ApiError
from weft.server.openai.conversation import Conversation
from weft.server.openai.models import ChatMessage
from weft.server.openai.tools import call_id
from weft.server.openai.translate import reasoning_details
from weft.server.stream import Wire
from weft.text.generation import Delta
from weft.text.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text
from weft.text.tokenizer import Tokenizer

_STATUS = {"length": "incomplete", "abort": "cancelled"}


def _error_event(error: ApiError) -> bytes:
    fields = {"type": "error", "code": error.code or str(error.status), "message": error.message, "param": error.param}
    return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"


RESPONSE_EVENTS = Wire(b"text/event-stream; charset=utf-8", _error_event, b"")


class ResponseReply:
    """One response. `finished` is called with it when it has ended."""

    def __init__(
        self,
        response: dict[str, Any],
        conversation: Conversation,
        tokenizer: Tokenizer,
        finished: Callable[[dict[str, Any], ChatMessage], None],
    ) -> None:
        self.response = response
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._finished = finished
        self._told: list[bytes] = []
        self._number = 0  # of the next event
        self._pieces: list[str] = []  # of the item that is open
        self._item: dict[str, Any] | None = None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self.events(delta)
        return msgspec.json.encode(self.response)

    def events(self, delta: Delta) -> bytes:
        if self._number == 0:
            self._tell("response.created", response=self.response)
            self._tell("response.in_progress", response=self.response)
        for found in self._conversation.events(delta):
            self._take(found)
        if delta.end is not None:
            self._close_item()
            self._finish(delta)
        told, self._told = self._told, []
        return b"".join(told)

    def closing(self) -> bytes:
        return b""

    def _take(self, found: Event) -> None:
        match found:
            case Text():
                self._open_item("message", {"role": "assistant", "content": []})
                self._add(found.text, "response.output_text.delta", content_index=0, logprobs=[])
            case Reasoning():
                self._open_item("reasoning", {"summary": [], "content": []})
                self._add(found.text, "response.reasoning_text.delta", content_index=0)
            case CallBegin():
                self._close_item()
                name = {"call_id": call_id(self._conversation.call_id_len), "name": found.name, "arguments": ""}
                self._open_item("function_call", name)
            case CallArguments():
                self._add(found.text, "response.function_call_arguments.delta")

    def _add(self, text: str, event: str, **fields: Any) -> None:
        assert self._item is not None
        self._pieces.append(text)
        self._tell(event, item_id=self._item["id"], output_index=self._place, delta=text, **fields)

    def _open_item(self, kind: str, fields: dict[str, Any]) -> None:
        """Begin an item, unless one of this kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        self._close_item()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        id = f"{prefix}_{call_id(24).removeprefix('call_')}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(self._item)
        self._tell("response.output_item.added", output_index=self._place, item=self._item)
        if kind != "function_call":
            self._tell_part("response.content_part.added", _part(kind, ""))

    def _close_item(self) -> None:
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return
        item["status"] = "completed"
        place: dict[str, Any] = {"item_id": item["id"], "output_index": self._place}
        if item["type"] == "function_call":
            item["arguments"] = text
            self._tell("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            if item["type"] == "message":
                place["logprobs"] = []
            self._tell(f"response.{part['type']}.done", **place, content_index=0, text=text)
            self._tell_part("response.content_part.done", part)
        self._tell("response.output_item.done", output_index=self._place, item=item)
        self._item = None
        self._pieces.clear()

    def _finish(self, delta: Delta) -> None:
        assert delta.end is not None
        response, end = self.response, delta.end
        status = "failed" if end.failed else _STATUS.get(end.reason, "completed")
        response["status"] = status
        if end.failed:
            response["error"] = {"code": "server_error", "message": end.message}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        reasoning = reasoning_details(self._tokenizer, self._conversation.outputs).reasoning_tokens
        response["usage"] = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens},
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        }
        self._finished(response, _message(response["output"]))
        self._tell(f"response.{status}", response=response)

    @property
    def _place(self) -> int:
        return len(self.response["output"]) - 1

    def _tell_part(self, event: str, part: dict[str, Any]) -> None:
        assert self._item is not None
        self._tell(event, item_id=self._item["id"], output_index=self._place, content_index=0, part=part)

    def _tell(self, event: str, **fields: Any) -> None:
        if self._conversation.generation.stream:
            data = msgspec.json.encode({"type": event, "sequence_number": self._number, **fields})
            self._told.append(b"event: %s\ndata: %s\n\n" % (event.encode(), data))
        self._number += 1


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _message(output: Sequence[dict[str, Any]]) -> ChatMessage:
    """The output as the message that a later request finds in its history."""
    message = ChatMessage(role="assistant", content="")
    for item in output:
        if item["type"] == "message":
            message.content = item["content"][0]["text"]
        elif item["type"] == "reasoning":
            message.reasoning_content = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.tool_calls = [*(message.tool_calls or ()), call]
    return message
