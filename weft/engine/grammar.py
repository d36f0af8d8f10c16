"""Between the engine's messages and `parts/grammar.py`: who waits for a grammar, who does no more, who never can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from weft.messages.control import RequestRow
from weft.messages.replies import StepOutput, Warned
from weft.messages.requests import Abort, GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.history.request_history import Event, EventKind
from weft.scheduler.scheduler import Scheduler

log = EventLog("grammar")


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    scheduler: Scheduler
    grammar: GrammarPart


def note_arrival(engine: Engine, message: GenerateRequest, now: float) -> None:
    """A request has come, and perhaps been refused: if it waits, and for a grammar, let this be compiled."""
    grammar = message.sampling.grammar
    if grammar is None or message.id not in engine.scheduler.requests:
        return
    _note(engine, message.id, f"{grammar}: it is being compiled", now)
    engine.grammar.begin(message.id, message.sampling, message.tenant)


def look_after(engine: Engine, now: float) -> StepOutput | None:
    """Let those go on whose grammar is ready, end those whose grammar is refused. Returns what their users are told."""
    warned = []
    for verdict in engine.grammar.take():
        if verdict.constraint is None:
            log.info(
                "refused", rid=engine.scheduler.requests[verdict.id].rid, reason=verdict.message
            )
            engine.scheduler.abort(
                Abort(ids=(verdict.id,), message=verdict.message, status=verdict.status)
            )
            continue
        took = f"after {1e3 * verdict.compile_s:,.1f} ms" if verdict.compile_s else "from the cache"
        _note(engine, verdict.id, f"ready {took}", now)
        warned += [Warned(id=verdict.id, text=text) for text in verdict.warnings]
    return StepOutput(warnings=warned) if warned else None


def told(engine: Engine, rows: Sequence[RequestRow]) -> list[RequestRow]:
    """The rows, with those that wait for a grammar marked."""

    def marked(row: RequestRow) -> RequestRow:
        return msgspec.structs.replace(row, state="grammar", why="its grammar is being compiled")

    return [marked(row) if row.id in engine.grammar.queue else row for row in rows]


def _note(engine: Engine, id: int, detail: str, now: float) -> None:
    engine.scheduler.history.note(
        id, Event(now, engine.scheduler.num_steps, EventKind.GRAMMAR, detail)
    )
