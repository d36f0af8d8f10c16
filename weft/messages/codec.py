"""Messages as msgpack bytes and back, by the tag of their type. Nothing that is read here can run code."""

from __future__ import annotations

import msgspec

from weft.messages.control import (
    AuditBooks,
    AuditReply,
    EngineFailed,
    EngineReady,
    ExplainRequest,
    ExplainRequestReply,
    FlushCache,
    FlushCacheReply,
    FreezeGC,
    FreezeGCReply,
    GetState,
    GetStateReply,
    ListRequests,
    ListRequestsReply,
    SetPolicy,
    SetPolicyReply,
    Shutdown,
    Stats,
)
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest

Call = FlushCache | GetState | FreezeGC | ListRequests | ExplainRequest | SetPolicy | AuditBooks
Reply = (
    FlushCacheReply
    | GetStateReply
    | FreezeGCReply
    | ListRequestsReply
    | ExplainRequestReply
    | SetPolicyReply
    | AuditReply
)
ToEngine = GenerateRequest | Abort | Call | Shutdown
FromEngine = StepOutput | Stats | Reply | EngineReady | EngineFailed
Message = ToEngine | FromEngine

TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

_encoder = msgspec.msgpack.Encoder()


class BadMessage(ValueError):
    """Bytes that are no message of the expected kind."""


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return TO_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadMessage(str(exc)) from exc


def decode_from_engine(data: bytes) -> FromEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return FROM_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadMessage(str(exc)) from exc
