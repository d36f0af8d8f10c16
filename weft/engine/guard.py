"""What becomes of a message whose handling raises: it ends what it brought, and the engine goes on.

    requests of the message that are not taken in ─▶ a final word with status 500
    a control request                             ─▶ `CallFailed`
    everybody else                                ─▶ nothing

It is counted, and written to the log once, with the traceback. Of a request that was taken in half, nothing is left:
the scheduler opens one as a whole or not at all (`Scheduler.add_request`), and what stands around it hears of its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weft.messages.calls import CallFailed
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import AuditKv, ExplainRequest, GetInternalState, GetState, ListRequests
from weft.messages.replies import Finish, StepOutput, ids_of
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.request import matching_ids
from weft.scheduler.scheduler import Scheduler

# A request is opened as a whole or not at all; the others only look. After any other the books begin anew.
LEAVES_BOOKS_ALONE = (
    GenerateRequest,
    BatchGenerate,
    ListRequests,
    ExplainRequest,
    GetState,
    GetInternalState,
    AuditKv,
)

log = EventLog("engine")


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    @property
    def scheduler(self) -> Scheduler: ...


class Sending(Protocol):
    """What is needed of an engine whose reply could not be sent: also of one that keeps a journal."""

    def lose(self, ids: tuple[int, ...], message: str) -> None: ...


def failed(engine: Engine, message: ToEngine, exc: BaseException) -> FromEngine | None:
    """The handler of `message` raised `exc`. Returns the reply, if one is due."""
    note(engine, type(message).__name__, exc)
    if isinstance(message, GenerateRequest | BatchGenerate):
        end_rest(engine, message, exc)
    elif isinstance(message, Abort):
        _end_matching(engine, message, exc)
    call = getattr(message, "call", None)
    return (
        None if call is None else CallFailed(call=call, message=told(type(message).__name__, exc))
    )


def refuse(engine: Engine, message: GenerateRequest, exc: BaseException) -> None:
    """A request could not be taken in because of `exc`: end it. No other request has its number."""
    note(engine, type(message).__name__, exc)
    if not engine.scheduler.has_ended(message.id):
        engine.scheduler.fail(message.id, told("this request", exc))


def end_rest(engine: Engine, message: GenerateRequest | BatchGenerate, exc: BaseException) -> None:
    """End the requests of a message that are neither open nor ended."""
    members: Iterable[GenerateRequest] = (
        message.requests if isinstance(message, BatchGenerate) else (message,)
    )
    scheduler = engine.scheduler
    for member in members:
        if member.id not in scheduler.requests and not scheduler.has_ended(member.id):
            scheduler.fail(member.id, told("this request", exc))


def note(engine: Engine, what: str, exc: BaseException) -> None:
    """Count a failure, and write it to the log."""
    engine.scheduler.counters.num_failed += 1
    _log(what, exc)


def _log(what: str, exc: BaseException) -> None:
    log.exception("message_failed", exc, message=what, error=type(exc).__name__)


def told(what: str, exc: BaseException) -> str:
    """For the user. What exactly was raised is for the log alone."""
    return f"the engine failed on {what} ({type(exc).__name__})"


def unsent(engine: Sending, reply: FromEngine, exc: BaseException) -> list[FromEngine]:
    """A reply could not be sent. Returns what is sent instead; requests that it was about end.

    What changes in the engine goes through `engine.lose`, so that a journal has it.
    """
    _log(type(reply).__name__, exc)
    ended = (
        {finish.id for finish in reply.finished} if isinstance(reply, StepOutput) else set[int]()
    )
    open_ids = ids_of(reply) - ended if isinstance(reply, StepOutput) else set[int]()
    engine.lose(tuple(sorted(open_ids)), told("this request's output", exc))
    if isinstance(reply, StepOutput):
        words = [
            Finish(id=id, reason="error", message=told("the answer", exc), status=500)
            for id in sorted(ended)
        ]
        return [StepOutput(finished=words)] if words else []
    call = getattr(reply, "call", None)
    return [] if call is None else [CallFailed(call=call, message=told(type(reply).__name__, exc))]


def lose(engine: Engine, ids: tuple[int, ...], message: str) -> None:
    """A reply could not be sent: count it, and end those of the requests `ids` that are open."""
    engine.scheduler.counters.num_failed += 1
    for id in ids:
        if id in engine.scheduler.requests:
            engine.scheduler.fail(id, message)


def _end_matching(engine: Engine, message: Abort, exc: BaseException) -> None:
    """End the requests that were to be aborted and are still open."""
    for id in matching_ids(engine.scheduler.requests, message):
        if id in engine.scheduler.requests:
            engine.scheduler.fail(id, told("the end of this request", exc))
