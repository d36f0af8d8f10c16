"""The parts of a request's body that the front reads and writes.

Fields keep the bytes that the client sent; only added fields are new. A body that is not a JSON
object is forwarded unchanged: the server answers with the error.

The front alone says where KV is. A client's own rooms go no further: they would let it choose the
server whose KV a decode server takes.
"""

from __future__ import annotations

import secrets
import uuid
from typing import NamedTuple

import msgspec

from weft.config.relay import ServerAddress
from weft.route.policy import RoutedRequest
from weft.server.errors import ApiError

# Paths whose bodies can have a room for the handoff of KV.
HANDED = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
# The fields of a prompt in their order in it. A template may use another, but fixed order.
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input_ids", "text")
NAMESPACE_FIELDS = ("model", "cache_salt", "extra_key", "lora_path")
# The prompts of requests with one of these fields are computed on the decode server.
COMPUTED_THERE = ("session_params", "input_embeds", "prompt_logprobs", "echo")
# Fields that name a room or its server.
ROOM_FIELDS = frozenset(
    {"bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"}
)
# A prompt of fewer bytes, as JSON, has less than about one page of KV.
LEAST_BYTES = 64
NOTHING = (b"null", b"false", b"0", b"[]", b"{}", b'""')

Fields = dict[str, msgspec.Raw]

_fields = msgspec.json.Decoder(Fields)
_encode = msgspec.json.encode


class SeenBody(NamedTuple):
    """The parts of a body that decide about its server."""

    fields: Fields  # without ROOM_FIELDS
    routed: RoutedRequest
    body: bytes  # without ROOM_FIELDS

    def asks(self, *names: str) -> bool:
        """Whether one of these fields has a value that is not empty."""
        return any(
            name in self.fields and bytes(self.fields[name]) not in NOTHING for name in names
        )

    def may_be_handed(self, path: str) -> bool:
        """Whether another server may compute the prompt."""
        is_long = len(self.routed.tokens) >= LEAST_BYTES
        return path in HANDED and is_long and not self.asks(*COMPUTED_THERE)

    def text(self, name: str) -> str | None:
        """The text of a field; None if it has none."""
        if name not in self.fields:
            return None
        try:
            return msgspec.json.decode(self.fields[name], type=str)
        except msgspec.DecodeError:
            return None

    @property
    def session(self) -> str:
        """The id of the session that the body names; "" if it names none."""
        named = self.fields.get("session_params")
        try:
            if named is not None:
                found = msgspec.json.decode(named, type=dict[str, msgspec.Raw]).get("id")
            else:
                found = self.fields.get("session_id")
            return "" if found is None else msgspec.json.decode(found, type=str)
        except (msgspec.DecodeError, RecursionError):
            return ""


def look_at(body: bytes) -> SeenBody:
    """Read a body. The text of the prompt is used as its tokens: about four bytes per token.

    Raises `ApiError` if the body is nested too deeply to be read.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    except RecursionError as exc:
        raise ApiError(400, "the body is nested too deeply") from exc
    if not ROOM_FIELDS.isdisjoint(fields):
        fields = {name: value for name, value in fields.items() if name not in ROOM_FIELDS}
        body = _encode(fields)
    prompt = b"".join(bytes(fields[name]) for name in PROMPT_FIELDS if name in fields)
    namespace = b" ".join(bytes(fields[name]) for name in NAMESPACE_FIELDS if name in fields)
    routed = RoutedRequest(prompt, namespace.decode("utf-8", "replace"))
    return SeenBody(fields, routed, body)


def new_room() -> int:
    """A random room number that clients cannot guess."""
    return secrets.randbits(63)


def for_prefill(seen: SeenBody, room: int) -> bytes:
    """The body for the prefill server, which answers when the prompt is computed."""
    fields = dict(seen.fields)
    fields.pop("stream_options", None)
    fields["stream"] = msgspec.Raw(b"false")
    fields["bootstrap_room"] = msgspec.Raw(b"%d" % room)
    return _encode(fields)


def for_decode(seen: SeenBody, room: int, lender: ServerAddress) -> bytes:
    """The body for the decode server, which continues the prompt that `lender` has computed."""
    added = {
        "bootstrap_host": msgspec.Raw(_encode(lender.host)),
        "bootstrap_port": msgspec.Raw(b"%d" % lender.bootstrap_port),
        "bootstrap_room": msgspec.Raw(b"%d" % room),
    }
    return _encode(seen.fields | added)


def with_session(seen: SeenBody) -> tuple[bytes, str]:
    """The body of a call that opens or closes a session, and the session's id. A random id is
    added if the body has none."""
    name = seen.session or uuid.uuid4().hex
    fields = seen.fields | {"session_id": msgspec.Raw(_encode(name))}
    return _encode(fields), name
