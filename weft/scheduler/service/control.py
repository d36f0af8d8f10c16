"""Control requests: one handler for each type of message, in one table.

To add one: a message and its reply in `messages/control.py`, a handler here, a line in `HANDLERS`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, get_args

from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import (
    AuditBooks,
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
from weft.messages.requests import Abort, GenerateRequest
from weft.scheduler.policy import UnknownPolicy
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.service import insight


class Engine(Protocol):
    """What handlers need of `service/engine.py`."""

    scheduler: Scheduler
    flushes: list[tuple[float, int]]  # deadline and call of flushes that wait for an idle engine
    audits: list[int]  # calls of audits that are to be made
    stop_at: float | None

    def clock(self) -> float: ...

    def stats(self) -> Stats: ...


Handler: TypeAlias = Callable[[Any, Any], FromEngine | None]


def generate(engine: Engine, message: GenerateRequest) -> None:
    engine.scheduler.add_request(message, engine.clock())


def abort(engine: Engine, message: Abort) -> None:
    engine.scheduler.abort(message)


def flush_cache(engine: Engine, message: FlushCache) -> FromEngine | None:
    """Flush now if the engine is idle, else wait for that as long as the message says."""
    engine.flushes.append((engine.clock() + message.timeout_s, message.call))
    return None


def get_state(engine: Engine, message: GetState) -> FromEngine:
    return GetStateReply(call=message.call, stats=engine.stats())


def freeze_gc(engine: Engine, message: FreezeGC) -> FromEngine:
    gc.collect()
    gc.freeze()
    return FreezeGCReply(call=message.call, frozen_objects=gc.get_freeze_count())


def list_requests(engine: Engine, message: ListRequests) -> FromEngine:
    return ListRequestsReply(
        call=message.call,
        queue=insight.get_queue_status(engine.scheduler),
        requests=insight.list_requests(engine.scheduler, engine.clock(), message.limit),
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


def audit_books(engine: Engine, message: AuditBooks) -> None:
    """Answered after the next step, when nothing is in flight."""
    engine.audits.append(message.call)


def shutdown(engine: Engine, message: Shutdown) -> None:
    engine.stop_at = engine.clock() + message.drain_s


HANDLERS: dict[type, Handler] = {
    GenerateRequest: generate,
    Abort: abort,
    FlushCache: flush_cache,
    GetState: get_state,
    FreezeGC: freeze_gc,
    ListRequests: list_requests,
    ExplainRequest: explain_request,
    SetPolicy: set_policy,
    AuditBooks: audit_books,
    Shutdown: shutdown,
}

_unhandled = set(get_args(ToEngine)) - set(HANDLERS)
assert not _unhandled, f"messages without a handler: {_unhandled}"


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
