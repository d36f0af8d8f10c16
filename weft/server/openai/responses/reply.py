"""A generation as a response: output items, complete or as typed events.

The same events produce both: they extend the object of the response, and in a stream each change is
also written as an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.server.chat.answers import add_cache_use, add_media, chat_logprobs, reasoning_details
from weft.server.chat.conversation import Conversation
from weft.server.chat.custom_tools import CustomCall
from weft.server.chat.models import PromptTokensDetails, TokenLogprob
from weft.server.chat.sealed import sealed
from weft.server.chat.tools import call_id
from weft.server.errors import ApiError
from weft.server.openai.responses.input_items import item_id
from weft.server.openai.responses.tools import OwnName
from weft.server.stream import SSE, Wire
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.tokenizer import Tokenizer

_CALLS = ("function_call", "custom_tool_call")
_STATUS = {"length": "incomplete", "abort": "cancelled"}


def _error_event(error: ApiError) -> bytes:
    fields = {
        "type": "error",
        "code": error.code or str(error.status),
        "message": error.message,
        "param": error.param,
    }
    return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"


RESPONSE_EVENTS = Wire(SSE, _error_event, b"")


class ResponseReply:
    """One response. It only makes bytes, also in a thread of writers: who keeps `response` does so
    in the event loop, before its end is sent."""

    def __init__(
        self,
        response: JsonObject,
        conversation: Conversation,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, OwnName],
        seals_reasoning: bool,
    ) -> None:
        """`names`: the tools of namespaces, by the names that the model uses.

        `seals_reasoning`: the client asked for `encrypted_content`.
        """
        self.response = response
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._names = names
        self._seals_reasoning = seals_reasoning
        self._events: list[bytes] = []
        self._number = 0  # number of the next event
        self._pieces: list[str] = []  # texts of the open item
        self._logprobs: list[Any] = []  # of its tokens, if requested
        self._untold = TokenQueue()  # tokens whose text was not sent yet
        self._item: JsonObject | None = None

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self.events(delta)
        return msgspec.json.encode(self.response)

    def events(self, delta: Delta) -> bytes:
        if self._number == 0:
            self._tell("response.created", response=self.response)
            self._tell("response.in_progress", response=self.response)
        if self._conversation.params.logprobs is not None:
            self._untold.add(chat_logprobs(self._tokenizer, delta).content)
        for found in self._conversation.events_and_custom_calls(delta):
            self._take(found)
        if delta.end is not None:
            if not self.response["output"] and not delta.end.failed:
                # Templates expect an answer between two messages of the user.
                self._open_item("message", {"role": "assistant", "content": []})
            self._close_item("incomplete" if delta.end.reason == "length" else "completed")
            self._finish(delta)
        events = b"".join(self._events)
        self._events.clear()
        return events

    def closing(self) -> bytes:
        return b""

    def _take(self, found: Event | CustomCall) -> None:
        match found:
            case AnswerText():
                self._open_item("message", {"role": "assistant", "content": []})
                logprobs = self._untold.take(found.text)
                self._logprobs += logprobs
                self._add(
                    found.text,
                    "response.output_text.delta",
                    content_index=0,
                    logprobs=logprobs,
                )
            case ReasoningText():
                self._untold.take(found.text)  # only those of the answer's text are sent
                self._open_item("reasoning", {"summary": [], "content": []})
                self._add(found.text, "response.reasoning_text.delta", content_index=0)
            case CallBegin():
                self._open_call("function_call", found.name, "arguments")
            case CallArguments():
                self._add(found.text, "response.function_call_arguments.delta")
            case CustomCall():
                self._open_call("custom_tool_call", found.name, "input")
                self._add(found.input, "response.custom_tool_call_input.delta")

    def _open_call(self, kind: str, name: str, content: str) -> None:
        """`content`: the field with the text of such a call."""
        self._close_item()
        fields: JsonObject = {
            "call_id": call_id(self._conversation.call_id_len),
            "name": name,
            content: "",
        }
        own = self._names.get(name)
        if own is not None:
            fields |= own._asdict()
        self._open_item(kind, fields)

    def _add(self, text: str, event: str, **fields: Any) -> None:
        """Add a piece of text to the open item."""
        self._pieces.append(text)
        self._tell(
            event,
            **self._item_fields(),
            delta=text,
            **fields,
        )

    def _open_item(self, kind: str, fields: JsonObject) -> None:
        """Open an item, unless one of this kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        self._close_item()
        self._item = {
            "id": item_id(kind),
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self.response["output"].append(self._item)
        self._tell(
            "response.output_item.added",
            output_index=self._index,
            item=self._item,
        )
        if kind not in _CALLS:
            self._tell_part("response.content_part.added", _part(kind, ""))

    def _close_item(self, status: str = "completed") -> None:
        item = self._item
        if item is None:
            return
        item["status"] = status
        text = "".join(self._pieces)
        fields = self._item_fields()
        if item["type"] == "function_call":
            item["arguments"] = text
            event = "response.function_call_arguments.done"
            self._tell(
                event,
                **fields,
                name=item["name"],
                arguments=text,
            )
        elif item["type"] == "custom_tool_call":
            item["input"] = text
            self._tell("response.custom_tool_call_input.done", **fields, input=text)
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            if item["type"] == "reasoning" and self._seals_reasoning:
                item["encrypted_content"] = sealed(text)
            if item["type"] == "message":
                part["logprobs"] = self._logprobs
                fields["logprobs"] = self._logprobs
                self._logprobs = []
            self._tell(
                f"response.{part['type']}.done",
                **fields,
                content_index=0,
                text=text,
            )
            self._tell_part("response.content_part.done", part)
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self._item = None
        self._pieces.clear()

    def _finish(self, delta: Delta) -> None:
        end = delta.end
        assert end is not None
        response = self.response
        status = _STATUS.get(end.reason, "completed")
        if end.failed:
            status = "failed"
            response["error"] = {"code": "server_error", "message": end.message}
        response["status"] = status
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        reasoning = reasoning_details(self._tokenizer, self._conversation.outputs)
        details = PromptTokensDetails(end.cached_tokens)
        add_media(details, self._conversation.request.media)
        add_cache_use(details, self._conversation.generation.completions)
        response["usage"] = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning.reasoning_tokens},
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        }
        self._tell(f"response.{status}", response=response)

    @property
    def _index(self) -> int:
        """The index of the open item, or of the last one."""
        return len(self.response["output"]) - 1

    def _item_fields(self) -> JsonObject:
        """The fields that identify the open item in events."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._index}

    def _tell_part(self, event: str, part: JsonObject) -> None:
        self._tell(
            event,
            **self._item_fields(),
            content_index=0,
            part=part,
        )

    def _tell(self, event: str, **fields: Any) -> None:
        if self._conversation.generation.stream:
            data = msgspec.json.encode(
                {
                    "type": event,
                    "sequence_number": self._number,
                    **fields,
                }
            )
            self._events.append(b"event: %s\ndata: %s\n\n" % (event.encode(), data))
        self._number += 1


class TokenQueue:
    """Log probabilities of tokens, stored until the text of these tokens arrives.

    Skips the marks of reasoning and calls, which are not part of any text. Cost: linear in the
    entries added and taken.
    """

    def __init__(self) -> None:
        self._text = ""
        self._entries: list[TokenLogprob] = []

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        self._entries += entries
        self._text += "".join(entry.token for entry in entries)

    def take(self, text: str) -> list[JsonObject]:
        """Take the entries of the first tokens with this text; drops the entries before them."""
        begin = self._text.find(text)
        if begin < 0:
            return []
        end = begin + len(text)
        offset = 0  # position in the text of all entries
        num_taken = 0
        found = []
        for entry in self._entries:
            if offset >= end:
                break
            num_taken += 1
            offset += len(entry.token)
            if offset > begin:
                found.append(msgspec.to_builtins(entry))
        del self._entries[:num_taken]
        self._text = self._text[offset:]
        return found


def _part(kind: str, text: str) -> JsonObject:
    if kind == "message":
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [],
        }
    return {"type": "reasoning_text", "text": text}
