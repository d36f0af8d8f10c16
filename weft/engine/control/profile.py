"""Handlers that start and stop the device's profiler, through a protocol without torch."""

from __future__ import annotations

from weft.engine.services import Services
from weft.messages.control import StartProfile, StartProfileReply, StopProfile, StopProfileReply


def start_profile(services: Services, message: StartProfile) -> StartProfileReply:
    try:
        trace = services.observers.profiler.start(
            num_steps=message.num_steps,
            activities=message.activities or (),
            record_shapes=message.record_shapes,
            with_stack=message.with_stack,
            profile_memory=message.profile_memory,
            folder=message.output_dir or "",
            prefix=message.profile_prefix or "",
        )
    except ValueError as exc:
        return StartProfileReply(success=False, message=str(exc))
    return StartProfileReply(success=True, is_preparing=trace is None, trace=trace or "")


def stop_profile(services: Services, message: StopProfile) -> StopProfileReply:
    try:
        report = services.observers.profiler.stop()
    except ValueError as exc:
        return StopProfileReply(state="none", message=str(exc))
    return StopProfileReply(
        state=report.state,
        num_steps=report.num_steps,
        trace=report.trace,
        table=report.table,
        message=report.message,
    )
