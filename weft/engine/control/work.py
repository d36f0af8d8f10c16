"""Handlers of work: requests come in, end, wait and go on.

What becomes of a request inside the scheduler is not known here, nor how a session keeps its turns.
"""

from __future__ import annotations

from weft.engine import grammar, guard, sessions
from weft.engine.control.target import ControlTarget
from weft.engine.processors import refusal
from weft.messages.control import (
    AbortRequest,
    AbortRequestReply,
    BlockInput,
    ContinueGeneration,
    GenerationReply,
    HealthCheck,
    HealthCheckReply,
    InputReply,
    PauseGeneration,
    SetPolicy,
    SetPolicyReply,
    UnblockInput,
)
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
)
from weft.observe.survivable import is_survivable
from weft.scheduler.policy import UnknownPolicy
from weft.scheduler.request import matching_ids

# ---- requests


def generate(engine: ControlTarget, message: GenerateRequest) -> None:
    _take_in(engine, message, engine.clock())


def batch_generate(engine: ControlTarget, message: BatchGenerate) -> None:
    """Take in each member by itself: a bad one ends with an error, which the others do not see."""
    now = engine.clock()
    for member in message.members():
        _take_in(engine, member, now)


def _take_in(engine: ControlTarget, message: GenerateRequest, now: float) -> None:
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


def _arrive(engine: ControlTarget, message: GenerateRequest, now: float, *, is_new: bool) -> None:
    refused = (
        engine.device.refusal
        or engine.vectors.refusal(message)
        or refusal(engine.processors, message)
    )
    scheduler = engine.scheduler
    if message.session is None or refused is not None:
        scheduler.add_request(message, now, refused)
    else:
        sessions.generate(engine.sessions, scheduler, message, message.session, now)
    if not is_new:
        return
    if message.id in scheduler.requests:
        engine.vectors.arrived(message)
    grammar.note_arrival(engine, message, now)
    # A request that cannot go on yet: its history says why.
    engine.input.note_arrival(scheduler, message.id, now)
    engine.pause.note_arrival(scheduler, message.id, now)


def abort(engine: ControlTarget, message: Abort) -> None:
    engine.sessions.cut(message.ids, message.output_lens)
    engine.scheduler.abort(message)


def abort_request(engine: ControlTarget, message: AbortRequest) -> AbortRequestReply:
    if not message.rid and not message.abort_all:
        return AbortRequestReply(success=False, message="give rid or abort_all")
    order = Abort(all=bool(message.abort_all), names=(message.rid or "",))
    num_chosen = len(matching_ids(engine.scheduler.requests, order))
    engine.scheduler.abort(order)
    return AbortRequestReply(success=True, aborted=num_chosen)


def set_policy(engine: ControlTarget, message: SetPolicy) -> SetPolicyReply:
    before = engine.scheduler.settings.policy
    try:
        engine.scheduler.set_policy(message.policy)
    except UnknownPolicy as exc:
        return SetPolicyReply(success=False, before=before, message=str(exc))
    return SetPolicyReply(success=True, before=before)


# ---- input and generation


def block_input(engine: ControlTarget, message: BlockInput) -> InputReply:
    engine.input.block(engine.scheduler)
    return _input_reply(engine)


def unblock_input(engine: ControlTarget, message: UnblockInput) -> InputReply:
    engine.input.unblock(engine.scheduler, engine.clock())
    return _input_reply(engine)


def _input_reply(engine: ControlTarget) -> InputReply:
    num_held = sum(1 for _ in engine.scheduler.waiting_queue.blocked())
    return InputReply(state=engine.input.state, held_requests=num_held)


def pause_generation(engine: ControlTarget, message: PauseGeneration) -> GenerationReply:
    """What is in flight is taken in first."""
    engine.settle()
    engine.pause.begin(engine.scheduler, message.mode, engine.clock())
    return _generation_reply(engine)


def continue_generation(engine: ControlTarget, message: ContinueGeneration) -> GenerationReply:
    engine.pause.end(engine.scheduler, engine.clock())
    return _generation_reply(engine)


def _generation_reply(engine: ControlTarget) -> GenerationReply:
    return GenerationReply(
        paused=engine.pause.mode or "", num_requests=len(engine.scheduler.requests)
    )


def health_check(engine: ControlTarget, message: HealthCheck) -> HealthCheckReply | None:
    """Answered by the next result, or at once where none can come."""
    if engine.pause.mode is not None:
        return HealthCheckReply(success=True, message="generation is paused")
    if not engine.device.is_free:
        return HealthCheckReply(success=True, message="weights or memory are being changed")
    engine.health.ask(message.call, engine.scheduler, engine.num_results, engine.clock())
    return None


# ---- sessions


def open_session(engine: ControlTarget, message: OpenSession) -> OpenSessionReply:
    return sessions.open_session(engine.sessions, message, engine.clock())


def close_session(engine: ControlTarget, message: CloseSession) -> CloseSessionReply:
    return sessions.close_session(engine.sessions, message, engine.clock())
