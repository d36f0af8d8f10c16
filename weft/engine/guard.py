"""After an exception, only the requests concerned end; it is counted and logged, and the engine
continues.

    a handler raises        ─▶ the message's requests that are not open end with status 500,
                               a control request gets `CallFailed`
    a reply cannot be sent  ─▶ the requests in it end, a control request gets `CallFailed`
    a hook raises           ─▶ it is called again in the next step
    the scheduler raises    ─▶ the loop recomputes; the guard reports it
    the device raises       ─▶ the loop ends the requests of the step; after `MAX_FAILURES_IN_A_ROW`
                               steps the engine ends, too, unless code from outside raised

Each failure is logged once, with its traceback. No request stays partly open: the scheduler opens a
request completely or not at all (`Scheduler.add_request`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.config.plugins import OutsideFault
from weft.messages.calls import CallFailed
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import AuditKv, ExplainRequest, GetInternalState, GetState, ListRequests
from weft.messages.replies import Finish, StepOutput, ids_of
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.request import matching_ids
from weft.scheduler.scheduler import Scheduler

MAX_FAILURES_IN_A_ROW = 3

# A request is opened completely or not at all; the other messages only read. After a fault in the
# handler of any other message, the scheduler's state is reset and recomputed.
LEAVES_STATE_INTACT = (
    GenerateRequest,
    BatchGenerate,
    ListRequests,
    ExplainRequest,
    GetState,
    GetInternalState,
    AuditKv,
)

log = EventLog("engine")


class EngineBroken(RuntimeError):
    """The device failed on several steps in a row, so the engine must end."""


class Guard:
    """Counts the failures of one engine. `report` gets every exception of the device and of the
    scheduler."""

    def __init__(self, scheduler: Scheduler, report: Callable[[Exception], None]) -> None:
        self._scheduler = scheduler
        self._report = report
        self._failing_hooks: set[str] = set()  # names of services whose hooks have raised before
        self.num_turns = 0  # calls of `Engine.step`
        self._failures_in_a_row = 0  # of the device, in consecutive turns
        self._failed_turn = 0  # the last turn with such a failure

    # Messages

    def message_failed(self, message: ToEngine, exc: BaseException) -> FromEngine | None:
        """The handler of `message` raised `exc`. Returns the reply, if the message needs one."""
        kind = type(message).__name__
        self.note(kind, exc)
        if isinstance(message, GenerateRequest):
            self._end_unopened([message], exc)
        elif isinstance(message, BatchGenerate):
            self._end_unopened(message.requests, exc)
        elif isinstance(message, Abort):
            self._end_matching(message, exc)
        call = getattr(message, "call", None)
        if call is None:
            return None
        return CallFailed(call=call, message=describe_failure(kind, exc))

    def request_failed(self, message: GenerateRequest, exc: BaseException) -> None:
        """A request could not be opened because of `exc`: end it. No other request has its id."""
        self.note(type(message).__name__, exc)
        if not self._scheduler.outbox.has_ended(message.id):
            self._scheduler.fail(message.id, describe_failure("this request", exc))

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        """A reply could not be sent: count it, and end those of the requests `ids` that are
        open."""
        self._scheduler.counters.messages.num_failed += 1
        for id in ids:
            if id in self._scheduler.requests:
                self._scheduler.fail(id, message)

    def note(self, what: str, exc: BaseException) -> None:
        """Count and log a failure."""
        self._scheduler.counters.messages.num_failed += 1
        _log(what, exc)

    def _end_unopened(self, messages: Sequence[GenerateRequest], exc: BaseException) -> None:
        """End the requests that are neither open nor ended."""
        scheduler = self._scheduler
        for message in messages:
            if message.id not in scheduler.requests and not scheduler.outbox.has_ended(message.id):
                scheduler.fail(message.id, describe_failure("this request", exc))

    def _end_matching(self, message: Abort, exc: BaseException) -> None:
        """End the requests of an abort that are still open."""
        for id in matching_ids(self._scheduler.requests, message):
            if id in self._scheduler.requests:
                self._scheduler.fail(id, describe_failure("the end of this request", exc))

    # Steps

    def hook_failed(self, name: str, exc: Exception) -> None:
        """A hook of the service `name` raised `exc`. No request ends; calls that wait for the
        service keep waiting. Raises EngineBroken if `exc` is one."""
        if isinstance(exc, EngineBroken):
            raise exc
        if name in self._failing_hooks:
            self._scheduler.counters.messages.num_failed += 1
            log.seldom("step_failed", what=name, error=type(exc).__name__)
            return
        self._failing_hooks.add(name)
        # Only the first time: if each step were recomputed, no request would ever end.
        self._scheduler.outbox.doubt()
        self.note(name, exc)

    def on_fault(self, exc: Exception) -> None:
        """The scheduler raised. This does not count as a failure in a row: if one request causes
        the fault, it ends when the fault comes again."""
        self._report(exc)
        self._scheduler.counters.num_faults += 1

    def on_failure(self, exc: Exception) -> None:
        """A step failed on the device. Raises EngineBroken after too many failures in a row; a
        fault of code from outside is none of the device."""
        self._report(exc)
        if isinstance(exc, OutsideFault):
            return
        # A turn without a failure ends the series. If two steps fail in one turn, both count.
        if self.num_turns > self._failed_turn + 1:
            self._failures_in_a_row = 0
        self._failed_turn = self.num_turns
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(
                f"{self._failures_in_a_row} steps failed in a row, the last with: {exc}"
            ) from exc


def describe_failure(what: str, exc: BaseException) -> str:
    """The message for the user. Details of the exception are only logged."""
    return f"the engine failed on {what} ({type(exc).__name__})"


def replace_unsent(
    reply: FromEngine, exc: BaseException, lose: Callable[[tuple[int, ...], str], None]
) -> list[FromEngine]:
    """A reply could not be sent. Returns the messages to send instead.

    `lose` ends the requests of the reply, by their ids and a message for the user. It is a method
    of the engine, or of the engine that keeps a journal, because a journal must record the change.
    """
    kind = type(reply).__name__
    _log(kind, exc)
    ended: set[int] = set()
    still_open: set[int] = set()
    if isinstance(reply, StepOutput):
        ended = {finish.id for finish in reply.finished}
        still_open = ids_of(reply) - ended
    # The scheduler sends the final replies of open requests. It no longer knows the ended ones.
    why = describe_failure("this request's output", exc)
    lose(tuple(sorted(still_open)), why)
    if isinstance(reply, StepOutput):
        return _final_words(sorted(ended), describe_failure("the answer", exc))
    call = getattr(reply, "call", None)
    if call is None:
        return []
    return [CallFailed(call=call, message=describe_failure(kind, exc))]


def _final_words(ids: Sequence[int], message: str) -> list[FromEngine]:
    """One output that ends these requests with an error; empty if there are none."""
    if not ids:
        return []
    finished = []
    for id in ids:
        finish = Finish(
            id=id,
            reason="error",
            message=message,
            status=500,
        )
        finished.append(finish)
    return [StepOutput(finished=finished)]


def _log(what: str, exc: BaseException) -> None:
    log.exception("message_failed", exc, message=what, error=type(exc).__name__)
