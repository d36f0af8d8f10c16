"""Handlers that start and stop the device's profiler. It stands behind a protocol: no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from weft.messages.control import StartProfile, StartProfileReply, StopProfile, StopProfileReply


class ProfileReport(Protocol):
    """How far a profile is, and its result: `executor/profile/profile.py`."""

    @property
    def state(self) -> Literal["none", "writing", "done", "failed"]: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def trace(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def message(self) -> str: ...


class Profiler(Protocol):
    """Records what the device does in the steps between `start` and `stop`.

    Neither waits for the device.
    """

    def start(
        self,
        *,
        num_steps: int | None,
        activities: Sequence[str],
        record_shapes: bool,
        with_stack: bool,
        profile_memory: bool,
        folder: str,
        prefix: str,
    ) -> str | None:
        """Record from the next step on, `num_steps` of them if not None.

        Returns the path of the trace below the profiler's folder, or nothing if none is written.
        None while all is being prepared, beside the steps: call again. Raises ValueError for what
        cannot be recorded, with what can.
        """
        ...

    def stop(self) -> ProfileReport:
        """Stop, if it still records, and say how far the report is.

        Call again while it is "writing".
        """
        ...


class NoProfiler:
    """For engines without a device to look at."""

    def start(self, **how: object) -> str | None:
        raise ValueError("this engine has no profiler")

    def stop(self) -> ProfileReport:
        raise ValueError("this engine has no profiler")


class ProfiledEngine(Protocol):
    """What both handlers need of the engine."""

    profiler: Profiler


def start_profile(engine: ProfiledEngine, message: StartProfile) -> StartProfileReply:
    try:
        trace = engine.profiler.start(
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


def stop_profile(engine: ProfiledEngine, message: StopProfile) -> StopProfileReply:
    try:
        report = engine.profiler.stop()
    except ValueError as exc:
        return StopProfileReply(state="none", message=str(exc))
    return StopProfileReply(
        state=report.state,
        num_steps=report.num_steps,
        trace=report.trace,
        table=report.table,
        message=report.message,
    )
