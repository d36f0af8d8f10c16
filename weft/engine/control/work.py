"""Handlers that end, hold or continue requests. (New requests come through `engine/arrivals.py`.)

This module does not know the states of a request in the scheduler, or how a session keeps its
turns.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.engine.device_jobs import DeviceJob, JobResult
from weft.engine.services import Services
from weft.messages.calls import CallFailed
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
from weft.messages.requests import Abort
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    KeepSessions,
    KeepSessionsReply,
    OpenSession,
    OpenSessionReply,
)
from weft.plan.device import MeetOthers
from weft.scheduler.policies import UnknownPolicy
from weft.scheduler.request import matching_ids

# ---- requests


def abort(services: Services, message: Abort) -> None:
    services.sessions.feature.cut(message.ids, message.output_lens)
    services.scheduler.abort(message)
    if services.handoff is not None:
        services.handoff.aborted(message.ids)


def abort_request(services: Services, message: AbortRequest) -> AbortRequestReply:
    if not message.rid and not message.abort_all:
        return AbortRequestReply(success=False, message="give rid or abort_all")
    order = Abort(all=bool(message.abort_all), names=(message.rid or "",))
    num_chosen = len(matching_ids(services.scheduler.requests, order))
    services.scheduler.abort(order)
    return AbortRequestReply(success=True, aborted=num_chosen)


def set_policy(services: Services, message: SetPolicy) -> SetPolicyReply:
    before = services.scheduler.settings.schedule_policy
    try:
        services.scheduler.set_policy(message.policy)
    except UnknownPolicy as exc:
        return SetPolicyReply(success=False, before=before, message=str(exc))
    return SetPolicyReply(success=True, before=before)


# ---- input and generation


def block_input(services: Services, message: BlockInput) -> InputReply | None:
    def change(at_s: float) -> None:
        now = services.clock() if at_s else 0.0
        services.flow.input_gate.block(now, at_s)

    return _change_input(services, message, change)


def unblock_input(services: Services, message: UnblockInput) -> InputReply | None:
    def change(at_s: float) -> None:
        services.flow.input_gate.unblock(services.clock(), message.ramp_s, at_s)

    return _change_input(services, message, change)


def _change_input(
    services: Services, message: BlockInput | UnblockInput, change: Callable[[float], None]
) -> InputReply | None:
    """Change the input at once; or, among engines that keep step, between the same steps of all.
    Then no step runs meanwhile, and the reply comes later."""
    if not message.together:
        change(message.at_s)
        return _input_reply(services)
    services.flow.input_gate.begin_meeting()

    def answer(result: JobResult) -> InputReply | CallFailed:
        services.flow.input_gate.end_meeting()
        if not result.reply.ok:
            failed = result.reply
            return CallFailed(call=message.call, message=failed.message, status=failed.status)
        change(0.0)
        return msgspec.structs.replace(_input_reply(services), call=message.call)

    services.device_jobs.submit(DeviceJob(MeetOthers(message.at_s), answer, is_logged=False))
    return None


def _input_reply(services: Services) -> InputReply:
    num_blocked = sum(1 for _ in services.scheduler.waiting_queue.blocked())
    gate = services.flow.input_gate
    left_s = 0.0
    if gate.state == "ramping":
        left_s = gate.ramp_left_s(services.clock())
    return InputReply(state=gate.state, held_requests=num_blocked, ramp_left_s=left_s)


def pause_generation(services: Services, message: PauseGeneration) -> GenerationReply:
    """The results of steps in flight are processed first."""
    services.core.settle()
    services.flow.pause.begin(message.mode, services.clock())
    return _generation_reply(services)


def continue_generation(services: Services, message: ContinueGeneration) -> GenerationReply:
    now = services.clock()
    is_paused = services.flow.pause.mode is not None
    # An input that was blocked meanwhile stays blocked.
    if message.ramp_s and is_paused and services.flow.input_gate.state == "unblocked":
        services.flow.input_gate.unblock(now, message.ramp_s)
    services.flow.pause.end(now)
    return _generation_reply(services)


def _generation_reply(services: Services) -> GenerationReply:
    return GenerationReply(
        paused=services.flow.pause.mode or "", num_requests=len(services.scheduler.requests)
    )


def health_check(services: Services, message: HealthCheck) -> HealthCheckReply | None:
    """Answered after the next result, or at once if there can be none."""
    if services.flow.pause.mode is not None:
        return HealthCheckReply(success=True, message="generation is paused")
    if services.device_jobs.is_meeting:
        return HealthCheckReply(success=True, message="all engines meet at the same step")
    if not services.device_jobs.is_free:
        return HealthCheckReply(success=True, message="weights or memory are being changed")
    services.observers.health.ask(message.call, services.clock())
    return None


# ---- sessions


def open_session(services: Services, message: OpenSession) -> OpenSessionReply | None:
    reply = services.sessions.open(message, services.clock())
    return services.sessions.told_first(reply, message.call)


def close_session(services: Services, message: CloseSession) -> CloseSessionReply | None:
    reply = services.sessions.close(message, services.clock())
    return services.sessions.told_first(reply, message.call)


def keep_sessions(services: Services, message: KeepSessions) -> KeepSessionsReply:
    return services.sessions.keep(message, services.clock())
