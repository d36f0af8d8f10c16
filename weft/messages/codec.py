"""Messages as msgpack bytes and back, by the tag of their type. Nothing that is read here can run code."""

from __future__ import annotations

import msgspec

from weft.messages.control import (
    AuditBooks,
    AuditReply,
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


def decode_from_engine(data: bytes) -> FromEngine:
    """The message in `data`. Raises `BadMessage` for anything else."""
    try:
        return FROM_ENGINE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMessage(str(exc)) from exc
