"""The table from messages to handlers, and the handlers of requests about the state of the engine:
its numbers, its requests, its accounts of memory.

To add a control request: a message in `messages/control.py`, a handler in this folder, its line in
`HANDLERS`. A handler gets the services of the engine and the message. It returns the reply, or None
if the reply comes with a later step; `answer` adds the number of the call. A handler never waits,
and reads the time only from the services, so that a journal with its message can be replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, get_args

import msgspec

from weft.engine import explain
from weft.engine.causes import find_holder
from weft.engine.control import cache, experts, outside, profile, settings, weights, work
from weft.engine.services import Services
from weft.messages.adapters import LoadLoraAdapter, UnloadLoraAdapter
from weft.messages.by_name import methods
from weft.messages.cache import ClearCache, ForgetPrefix, GetCache, SaveCache
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import ToEngine
from weft.messages.control import (
    AbortRequest,
    AuditKv,
    BlockInput,
    ConfigureLogging,
    ContinueGeneration,
    DumpExpertDistributionRecord,
    ExplainRequest,
    ExplainRequestReply,
    FindPrefix,
    FindPrefixReply,
    FlushCache,
    FreezeGC,
    FreezeGCReply,
    GetExpertDistributionRecord,
    GetInternalState,
    GetState,
    GetStateReply,
    HealthCheck,
    ListMethods,
    ListMethodsReply,
    ListRequests,
    ListRequestsReply,
    LogRequestTimes,
    LogRequestTimesReply,
    PauseGeneration,
    QueueStatus,
    SetInternalState,
    SetPolicy,
    SlowDown,
    StartExpertDistributionRecord,
    StartProfile,
    StopExpertDistributionRecord,
    StopProfile,
    UnblockInput,
)
from weft.messages.outside import CallOutside
from weft.messages.picture import GetPrefix, Watch
from weft.messages.pins import ToolPause, Unpin
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import CloseSession, KeepSessions, OpenSession
from weft.messages.status import Shutdown, UnreadableMessages
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

Handler: TypeAlias = Callable[[Any, Any], ControlReply | None]


class IncompleteTable(LookupError):
    """There are messages without a handler; the error names them."""


# ---- cache, garbage collector, audit


def flush_cache(services: Services, message: FlushCache) -> None:
    """Answered after a step in which the engine is idle, or at the time limit."""
    services.flushes.ask(message.call, services.clock() + message.timeout_s)


def freeze_gc(services: Services, message: FreezeGC) -> FreezeGCReply:
    garbage.freeze()
    return FreezeGCReply(frozen_objects=gc.get_freeze_count())


def audit_kv(services: Services, message: AuditKv) -> None:
    """Answered after the next step, when no step is in flight."""
    services.observers.kv_auditor.ask(message.call)


# ---- numbers and requests


def get_state(services: Services, message: GetState) -> GetStateReply:
    return GetStateReply(stats=services.stats())


def list_requests(services: Services, message: ListRequests) -> ListRequestsReply:
    rows = explain.list_requests(
        services.scheduler,
        services.clock(),
        message.limit,
        session_of=services.sessions.feature.session_of,
        compiling=services.grammars.feature.queue,
    )
    return ListRequestsReply(queue=_queue_status(services), requests=rows)


def _queue_status(services: Services) -> QueueStatus:
    """The queue in numbers, and whether input and generation are open."""
    gate = services.flow.input_gate
    left_s = 0.0
    if gate.state == "ramping":
        left_s = gate.ramp_left_s(services.clock())
    return msgspec.structs.replace(
        explain.get_queue_status(services.scheduler, len(services.sessions.feature)),
        grammar_queue_size=len(services.grammars.feature.queue),
        input_state=gate.state,
        ramp_left_s=left_s,
        paused=services.flow.pause.mode or "",
    )


def explain_request(services: Services, message: ExplainRequest) -> ExplainRequestReply:
    now = services.clock()
    found = explain.trace_request_flow(
        services.scheduler,
        message.rid,
        now,
        number=message.number,
        viewer=message.viewer,
        with_prompt=message.with_prompt,
        compiling=services.grammars.feature.queue,
    )
    if services.flow.pause.mode is not None:
        return ExplainRequestReply(found=found)
    with_waits = [services.deadlines.with_wait(one, now) for one in found]
    return ExplainRequestReply(found=with_waits)


def find_prefix(services: Services, message: FindPrefix) -> FindPrefixReply:
    found = find_holder(
        services.scheduler, message.namespace, message.prompt, message.before_s, message.viewer
    )
    return FindPrefixReply(found=[] if found is None else [found])


def log_request_times(services: Services, message: LogRequestTimes) -> LogRequestTimesReply:
    now = services.clock()
    found = explain.trace_request_flow(services.scheduler, message.rid, now)
    for one in found:
        explain.log_request_processing_time(services.scheduler, one.id, now)
    return LogRequestTimesReply(num_requests=len(found))


def watch(services: Services, message: Watch) -> None:
    """Answered after the running step, or at once without work."""
    services.observers.pictures.ask(message)


def list_methods(services: Services, message: ListMethods) -> ListMethodsReply:
    return ListMethodsReply(methods=methods())


# ---- the process


def shutdown(services: Services, message: Shutdown) -> None:
    services.flow.shutdown.begin(services.clock() + message.drain_s)


def tool_pause(services: Services, message: ToolPause) -> None:
    services.pins.pauses.paused(message, services.clock())


def count_unreadable(services: Services, message: UnreadableMessages) -> None:
    services.scheduler.counters.messages.num_unreadable += message.num


HANDLERS: dict[type, Handler] = {
    Abort: work.abort,
    ToolPause: tool_pause,
    AbortRequest: work.abort_request,
    SetPolicy: work.set_policy,
    BlockInput: work.block_input,
    UnblockInput: work.unblock_input,
    PauseGeneration: work.pause_generation,
    ContinueGeneration: work.continue_generation,
    HealthCheck: work.health_check,
    OpenSession: work.open_session,
    CloseSession: work.close_session,
    KeepSessions: work.keep_sessions,
    FlushCache: flush_cache,
    GetCache: cache.get_cache,
    ClearCache: cache.clear_cache,
    SaveCache: cache.save_cache,
    Unpin: cache.unpin,
    GetPrefix: cache.get_prefix,
    ForgetPrefix: cache.forget_prefix,
    FreezeGC: freeze_gc,
    AuditKv: audit_kv,
    GetState: get_state,
    ListRequests: list_requests,
    ExplainRequest: explain_request,
    FindPrefix: find_prefix,
    LogRequestTimes: log_request_times,
    ListMethods: list_methods,
    CallOutside: outside.call_outside,
    Watch: watch,
    GetInternalState: settings.get_internal_state,
    SetInternalState: settings.set_internal_state,
    ConfigureLogging: settings.configure_logging,
    SlowDown: settings.slow_down,
    StartProfile: profile.start_profile,
    StopProfile: profile.stop_profile,
    StartExpertDistributionRecord: experts.start_record,
    StopExpertDistributionRecord: experts.stop_record,
    GetExpertDistributionRecord: experts.look_at_record,
    DumpExpertDistributionRecord: experts.dump_record,
    UpdateWeightsFromDisk: weights.update_weights_from_disk,
    UpdateWeightsFromTensor: weights.update_weights_from_tensor,
    UpdateWeightsFromDistributed: weights.update_weights_from_distributed,
    InitWeightsUpdateGroup: weights.init_weights_update_group,
    DestroyWeightsUpdateGroup: weights.destroy_weights_update_group,
    GetWeightsByName: weights.get_weights_by_name,
    LoadLoraAdapter: weights.load_lora_adapter,
    UnloadLoraAdapter: weights.unload_lora_adapter,
    ReleaseMemoryOccupation: weights.release_memory_occupation,
    ResumeMemoryOccupation: weights.resume_memory_occupation,
    UnreadableMessages: count_unreadable,
    Shutdown: shutdown,
}


def require_all(handlers: Mapping[type, Handler], messages: Collection[type]) -> None:
    """Raise `IncompleteTable` unless each of these messages has a handler."""
    missing = sorted(kind.__name__ for kind in messages if kind not in handlers)
    if missing:
        raise IncompleteTable(f"messages without a handler: {', '.join(missing)}")


# Requests need no table: `Engine.submit` takes them in.
require_all(HANDLERS, set(get_args(ToEngine)) - {GenerateRequest, BatchGenerate})


def answer(services: Services, handler: Handler, message: ToEngine) -> ControlReply | None:
    """Call the handler of a message. Returns the reply, if there is one at once."""
    reply = handler(services, message)
    if reply is None or not isinstance(message, ControlRequest):
        return None
    return msgspec.structs.replace(reply, call=message.call)
