"""Handlers of what controls the flow of work: health checks, blocking the input, pausing generation."""

from __future__ import annotations

from typing import Protocol

from weft.engine.device_jobs import Device
from weft.engine.health import HealthChecks
from weft.engine.input_gate import InputBlocker
from weft.engine.pause import Pause
from weft.messages.codec import FromEngine
from weft.messages.flow import (
    Block,
    ContinueGeneration,
    Dropped,
    GenerationReply,
    HealthCheck,
    HealthCheckReply,
    InputReply,
    PauseGeneration,
    Unblock,
)
from weft.scheduler.scheduler import Scheduler


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    scheduler: Scheduler
    input: InputBlocker
    pause: Pause
    device: Device
    health: HealthChecks

    @property
    def num_results(self) -> int: ...

    def clock(self) -> float: ...

    def settle(self) -> None: ...


def note_arrival(engine: Engine, id: int, now: float) -> None:
    """A request has come: if it cannot go on yet, its trace says why."""
    engine.input.note_arrival(engine.scheduler, id, now)
    engine.pause.note_arrival(engine.scheduler, id, now)


def health_check(engine: Engine, message: HealthCheck) -> FromEngine | None:
    if engine.pause.mode is not None:
        return HealthCheckReply(call=message.call, success=True, message="generation is paused")
    if not engine.device.is_free:
        return HealthCheckReply(
            call=message.call, success=True, message="weights or memory are being changed"
        )
    engine.health.ask(message.call, engine.scheduler, engine.num_results, engine.clock())
    return None


def block(engine: Engine, message: Block) -> FromEngine:
    engine.input.block(engine.scheduler)
    return _input_reply(engine, message.call)


def unblock(engine: Engine, message: Unblock) -> FromEngine:
    engine.input.unblock(engine.scheduler, engine.clock())
    return _input_reply(engine, message.call)


def _input_reply(engine: Engine, call: int) -> InputReply:
    num_held = sum(1 for _ in engine.scheduler.waiting_queue.blocked())
    return InputReply(call=call, state=engine.input.state.value, held_requests=num_held)


def pause_generation(engine: Engine, message: PauseGeneration) -> FromEngine:
    """What is in flight is taken in first."""
    engine.settle()
    engine.pause.begin(engine.scheduler, message.mode, engine.clock())
    return _generation_reply(engine, message.call)


def continue_generation(engine: Engine, message: ContinueGeneration) -> FromEngine:
    engine.pause.end(engine.scheduler, engine.clock())
    return _generation_reply(engine, message.call)


def _generation_reply(engine: Engine, call: int) -> GenerationReply:
    return GenerationReply(
        call=call, paused=engine.pause.mode or "", num_requests=len(engine.scheduler.requests)
    )


def dropped(engine: Engine, message: Dropped) -> None:
    engine.scheduler.counters.num_unreadable += message.num
