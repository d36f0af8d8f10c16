"""Control requests: one handler for each type of message, in one table.

To add one: a message and its reply in `messages/control.py`, a handler here, a line in `HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, get_args

from weft.engine import explain as insight
from weft.engine import grammar, guard
from weft.engine import sessions as session_requests
from weft.engine.control import flow, weights
from weft.engine.control.dispatch import TypeBasedDispatcher
from weft.engine.control.profile import Profiler, start_profile, stop_profile
from weft.engine.control.rpc import queue_status, rpc
from weft.engine.control.settings import (
    configure_logging,
    get_internal_state,
    set_internal_state,
    slow_down,
)
from weft.engine.device_jobs import Device
from weft.engine.health import HealthChecks
from weft.engine.input_gate import InputBlocker
from weft.engine.pause import Pause
from weft.engine.processors import Processors, refusal
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import (
    AuditBooks,
    ConfigureLogging,
    ExplainRequest,
    ExplainRequestReply,
    FlushCache,
    FlushCacheReply,
    FreezeGC,
    FreezeGCReply,
    GetInternalState,
    GetState,
    GetStateReply,
    ListRequests,
    ListRequestsReply,
    SetInternalState,
    SetPolicy,
    SetPolicyReply,
    Shutdown,
    SlowDown,
    StartProfile,
    Stats,
    StopProfile,
)
from weft.messages.flow import (
    Block,
    ContinueGeneration,
    Dropped,
    HealthCheck,
    PauseGeneration,
    Rpc,
    Unblock,
)
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import CloseSession, OpenSession
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    ReleaseMemoryOccupation,
    ResumeMemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
)
from weft.observe import garbage
from weft.observe.survivable import is_survivable
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.features.vectors import VectorsPart
from weft.scheduler.policy import UnknownPolicy
from weft.scheduler.scheduler import Scheduler


class Engine(Protocol):
    """What handlers need of `service/engine.py`."""

    scheduler: Scheduler
    sessions: Sessions
    grammar: GrammarPart
    vectors: VectorsPart
    processors: Processors
    flushes: list[tuple[float, int]]  # deadline and call of flushes that wait for an idle engine
    audits: list[int]  # calls of audits that are to be made
    stop_at: float | None
    min_step_s: float  # that whoever calls `step` lets pass from one to the next
    profiler: Profiler
    input: InputBlocker
    pause: Pause
    device: Device
    health: HealthChecks

    @property
    def num_results(self) -> int: ...

    def clock(self) -> float: ...

    def settle(self) -> None: ...

    def stats(self) -> Stats: ...


Handler: TypeAlias = Callable[[Any, Any], FromEngine | None]


def generate(engine: Engine, message: GenerateRequest) -> None:
    _take_in(engine, message, engine.clock())


def batch_generate(engine: Engine, message: BatchGenerate) -> None:
    """Take in each member by itself: a bad one ends with an error, and the others do not notice."""
    now = engine.clock()
    for member in message.members():
        _take_in(engine, member, now)


def _take_in(engine: Engine, message: GenerateRequest, now: float) -> None:
    """Take a request in, or, if that raises, end it alone."""
    is_new = message.id not in engine.scheduler.requests
    try:
        _arrive(engine, message, now, is_new=is_new)
    except BaseException as exc:
        if not is_survivable(exc):
            raise
        if is_new:
            guard.refuse(engine, message, exc)
        else:
            guard.note(engine, type(message).__name__, exc)


def _arrive(engine: Engine, message: GenerateRequest, now: float, *, is_new: bool) -> None:
    refused = (
        engine.device.refusal
        or engine.vectors.refusal(message)
        or refusal(engine.processors, message)
    )
    if message.session is None or refused is not None:
        engine.scheduler.add_request(message, now, refused)
    else:
        session_requests.generate(engine.sessions, engine.scheduler, message, message.session, now)
    if is_new:
        if message.id in engine.scheduler.requests:
            engine.vectors.arrived(message)
        grammar.note_arrival(engine, message, now)
        flow.note_arrival(engine, message.id, now)


def abort(engine: Engine, message: Abort) -> None:
    engine.sessions.cut(message.ids, message.output_lens)
    engine.scheduler.abort(message)


def flush_cache(engine: Engine, message: FlushCache) -> FromEngine | None:
    """Flush now if the engine is idle, else wait for that as long as the message says."""
    engine.flushes.append((engine.clock() + message.timeout_s, message.call))
    return None


def get_state(engine: Engine, message: GetState) -> FromEngine:
    return GetStateReply(call=message.call, stats=engine.stats())


def freeze_gc(engine: Engine, message: FreezeGC) -> FromEngine:
    return FreezeGCReply(call=message.call, frozen_objects=garbage.freeze())


def list_requests(engine: Engine, message: ListRequests) -> FromEngine:
    rows = insight.list_requests(
        engine.scheduler, engine.clock(), message.limit, engine.sessions.session_of
    )
    return ListRequestsReply(
        call=message.call, queue=queue_status(engine), requests=grammar.told(engine, rows)
    )


def explain_request(engine: Engine, message: ExplainRequest) -> FromEngine:
    found = insight.trace_request_flow(engine.scheduler, message.rid, engine.clock())
    return ExplainRequestReply(call=message.call, found=found)


def set_policy(engine: Engine, message: SetPolicy) -> FromEngine:
    before = engine.scheduler.settings.policy
    try:
        engine.scheduler.set_policy(message.policy)
    except UnknownPolicy as exc:
        return SetPolicyReply(call=message.call, success=False, before=before, message=str(exc))
    return SetPolicyReply(call=message.call, success=True, before=before)


def open_session(engine: Engine, message: OpenSession) -> FromEngine:
    return session_requests.open_session(engine.sessions, message, engine.clock())


def close_session(engine: Engine, message: CloseSession) -> FromEngine:
    return session_requests.close_session(engine.sessions, message, engine.clock())


def audit_books(engine: Engine, message: AuditBooks) -> None:
    """Answered after the next step, when nothing is in flight."""
    engine.audits.append(message.call)


def shutdown(engine: Engine, message: Shutdown) -> None:
    engine.stop_at = engine.clock() + message.drain_s


HANDLERS: dict[type, Handler] = {
    GenerateRequest: generate,
    BatchGenerate: batch_generate,
    Abort: abort,
    FlushCache: flush_cache,
    GetState: get_state,
    FreezeGC: freeze_gc,
    ListRequests: list_requests,
    ExplainRequest: explain_request,
    SetPolicy: set_policy,
    OpenSession: open_session,
    CloseSession: close_session,
    AuditBooks: audit_books,
    SlowDown: slow_down,
    StartProfile: start_profile,
    StopProfile: stop_profile,
    GetInternalState: get_internal_state,
    SetInternalState: set_internal_state,
    ConfigureLogging: configure_logging,
    HealthCheck: flow.health_check,
    Block: flow.block,
    Unblock: flow.unblock,
    PauseGeneration: flow.pause_generation,
    ContinueGeneration: flow.continue_generation,
    Rpc: rpc,
    UpdateWeightsFromDisk: weights.update_weights_from_disk,
    UpdateWeightsFromTensor: weights.update_weights_from_tensor,
    UpdateWeightsFromDistributed: weights.update_weights_from_distributed,
    InitWeightsUpdateGroup: weights.init_weights_update_group,
    DestroyWeightsUpdateGroup: weights.destroy_weights_update_group,
    GetWeightsByName: weights.get_weights_by_name,
    ReleaseMemoryOccupation: weights.release_memory_occupation,
    ResumeMemoryOccupation: weights.resume_memory_occupation,
    Dropped: flow.dropped,
    Shutdown: shutdown,
}

DISPATCHER = TypeBasedDispatcher(HANDLERS)
DISPATCHER.require(get_args(ToEngine))


def answer_flushes(engine: Engine) -> list[FromEngine]:
    """Replies to flushes that can be answered now: done, or out of time."""
    replies: list[FromEngine] = []
    waiting = []
    for deadline, call in engine.flushes:
        if engine.scheduler.flush_cache():
            replies.append(FlushCacheReply(call=call, success=True))
        elif engine.clock() >= deadline:
            stats = engine.stats()
            reason = f"{stats.num_running} requests are running and {stats.num_waiting} wait; the cache is in use"
            replies.append(FlushCacheReply(call=call, success=False, message=reason))
        else:
            waiting.append((deadline, call))
    engine.flushes = waiting
    return replies
