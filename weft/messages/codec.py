"""Encodes messages as msgpack bytes, and decodes them by the tag of their type. Decoding never runs
code from the data.

The modules imported here determine which control requests and replies exist: each message declares
itself (`calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import msgspec

from weft.messages import adapters, cache, control, outside, picture, pins, sessions, weights
from weft.messages.calls import (
    ControlReply,
    ControlRequest,
    control_replies,
    control_requests,
)
from weft.messages.pins import ToolPause
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import SessionChanges
from weft.messages.status import (
    EngineFailed,
    EngineReady,
    Heartbeat,
    Shutdown,
    Stats,
    UnreadableMessages,
)

# The modules that declare control messages: without them the registry would be empty.
_DECLARED_IN = (adapters, cache, control, outside, picture, pins, sessions, weights)
REQUESTS = control_requests()

if TYPE_CHECKING:
    ToEngine: TypeAlias = (
        GenerateRequest
        | BatchGenerate
        | Abort
        | ToolPause
        | UnreadableMessages
        | Shutdown
        | ControlRequest[Any]
    )
    FromEngine: TypeAlias = (
        StepOutput | Stats | Heartbeat | EngineReady | EngineFailed | SessionChanges | ControlReply
    )
else:
    # A decoder distinguishes messages by their tags, so it needs each type, not their base classes.
    ToEngine = Union[
        (
            GenerateRequest,
            BatchGenerate,
            Abort,
            ToolPause,
            UnreadableMessages,
            Shutdown,
            *REQUESTS.values(),
        )
    ]
    FromEngine = Union[
        (
            StepOutput,
            Stats,
            Heartbeat,
            EngineReady,
            EngineFailed,
            SessionChanges,
            *control_replies(),
        )
    ]

Message: TypeAlias = ToEngine | FromEngine

TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


class BadMessage(ValueError):
    """The bytes are not a message of the expected kind."""


def decode_to_engine(data: bytes) -> ToEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return TO_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMessage(str(exc)) from exc


def decode_from_engine(data: bytes) -> FromEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return FROM_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMessage(str(exc)) from exc


class Unreadable(NamedTuple):
    """A message that cannot be decoded: its addressees, as far as they can be read."""

    call: int | None
    ids: frozenset[int]  # of requests


NOBODY = Unreadable(None, frozenset())


def salvage(data: bytes) -> Unreadable:
    """The addressees of the message in `data`, as far as they can be read.

    `data` could not be decoded, so this function reads its parts one by one.
    """
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOBODY
    if not isinstance(fields, dict):
        return NOBODY
    call = fields.get("call")
    if not isinstance(call, int):
        call = None
    ids: set[int] = set()
    packed = fields.get("ids")
    if isinstance(packed, bytes):
        end = len(packed) // 8 * 8
        ids.update(memoryview(packed[:end]).cast("q"))
    for name in ("finished", "aux"):
        parts = fields.get(name)
        if isinstance(parts, list):
            ids.update(part["id"] for part in parts if _has_id(part))
    return Unreadable(call, frozenset(ids))


def _has_id(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("id"), int)


def read_from_engine(data: bytes) -> FromEngine | Unreadable:
    """The message in `data`, or its addressees.

    Raises `BadMessage` if not even these can be read.
    """
    try:
        return decode_from_engine(data)
    except BadMessage:
        found = salvage(data)
        if found == NOBODY:
            raise
        return found
