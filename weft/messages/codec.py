"""Messages as msgpack bytes and back, by the tag of their type. Nothing that is read here can run code."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.messages.control import (
    AuditBooks,
    AuditReply,
    CallFailed,
    ConfigureLogging,
    ConfigureLoggingReply,
    EngineFailed,
    EngineReady,
    ExplainRequest,
    ExplainRequestReply,
    FlushCache,
    FlushCacheReply,
    FreezeGC,
    FreezeGCReply,
    GetInternalState,
    GetInternalStateReply,
    GetState,
    GetStateReply,
    Heartbeat,
    ListRequests,
    ListRequestsReply,
    SetInternalState,
    SetInternalStateReply,
    SetPolicy,
    SetPolicyReply,
    Shutdown,
    SlowDown,
    SlowDownReply,
    StartProfile,
    StartProfileReply,
    Stats,
    StopProfile,
    StopProfileReply,
)
from weft.messages.flow import (
    Block,
    ContinueGeneration,
    Dropped,
    GenerationReply,
    HealthCheck,
    HealthCheckReply,
    InputReply,
    PauseGeneration,
    Rpc,
    RpcReply,
    Unblock,
)
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import CloseSession, CloseSessionReply, OpenSession, OpenSessionReply
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    GetWeightsByNameReply,
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightsReply,
)

Call = (
    FlushCache
    | GetState
    | FreezeGC
    | ListRequests
    | ExplainRequest
    | SetPolicy
    | AuditBooks
    | SlowDown
    | StartProfile
    | StopProfile
    | GetInternalState
    | SetInternalState
    | ConfigureLogging
    | OpenSession
    | CloseSession
    | HealthCheck
    | Block
    | Unblock
    | PauseGeneration
    | ContinueGeneration
    | Rpc
    | UpdateWeightsFromDisk
    | UpdateWeightsFromTensor
    | UpdateWeightsFromDistributed
    | InitWeightsUpdateGroup
    | DestroyWeightsUpdateGroup
    | GetWeightsByName
    | ReleaseMemoryOccupation
    | ResumeMemoryOccupation
)
Reply = (
    FlushCacheReply
    | GetStateReply
    | FreezeGCReply
    | ListRequestsReply
    | ExplainRequestReply
    | SetPolicyReply
    | AuditReply
    | SlowDownReply
    | StartProfileReply
    | StopProfileReply
    | GetInternalStateReply
    | SetInternalStateReply
    | ConfigureLoggingReply
    | OpenSessionReply
    | CloseSessionReply
    | HealthCheckReply
    | InputReply
    | GenerationReply
    | RpcReply
    | WeightsReply
    | GetWeightsByNameReply
    | CallFailed
)
ToEngine = GenerateRequest | BatchGenerate | Abort | Call | Dropped | Shutdown
FromEngine = StepOutput | Stats | Heartbeat | Reply | EngineReady | EngineFailed
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMessage(str(exc)) from exc


class Unreadable(NamedTuple):
    """A message that cannot be read as a whole, and whom it was for."""

    call: int | None
    ids: frozenset[int]  # of requests


def salvaged(data: bytes) -> Unreadable:
    """Whom the message in `data` was for, as far as it can be told: it is no message of the expected kind."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Unreadable(None, frozenset())
    call, packed = fields.get("call"), fields.get("ids")
    ids = (
        set(memoryview(packed[: len(packed) // 8 * 8]).cast("q"))
        if isinstance(packed, bytes)
        else set()
    )
    for name in ("finished", "given"):
        told = fields.get(name)
        ids |= {one["id"] for one in told if _has_id(one)} if isinstance(told, list) else set()
    return Unreadable(call if isinstance(call, int) else None, frozenset(ids))


def _has_id(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("id"), int)


def read_from_engine(data: bytes) -> FromEngine | Unreadable:
    """The message in `data`, or whom it was for. Raises `BadMessage` if not even that can be told."""
    try:
        return decode_from_engine(data)
    except BadMessage:
        found = salvaged(data)
        if found.call is None and not found.ids:
            raise
        return found


def decode_from_engine(data: bytes) -> FromEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return FROM_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMessage(str(exc)) from exc
