"""Connects the engine's messages with `scheduler/features/sessions.py`: opening and closing
sessions, requests of sessions, and timeouts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.calls import ControlReply
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import InvalidParam
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    KeepSessions,
    KeepSessionsReply,
    OpenSession,
    OpenSessionReply,
    SessionChanges,
)
from weft.observe.log import EventLog
from weft.scheduler.features.sessions import Begun, Sessions
from weft.scheduler.features.turns import Dropped, TurnRefused, session_name
from weft.scheduler.history import EventKind
from weft.scheduler.limits import Refusal

log = EventLog("sessions")
R = TypeVar("R", bound=ControlReply)


class SessionService(Service):
    """Attached while a session is open."""

    name = "sessions"

    def __init__(
        self,
        core: EngineCore,
        feature: Sessions,
    ) -> None:
        self._core = core
        self.feature = feature
        # The turn of the request that is being opened, from `begin_turn` to `enter_turn`.
        self._begun: Begun | None = None

    def wake_at(self) -> float:
        return self.feature.due_s

    def open(
        self,
        message: OpenSession,
        now: float,
    ) -> OpenSessionReply:
        self._close_late(now)
        id = message.session_id
        try:
            self.feature.open(id, message.capacity, message.timeout_s, now, message.owner)
        except InvalidParam as exc:
            log.warning("not_opened", session=id, reason=exc)
            return OpenSessionReply(success=False, message=str(exc), wrong=exc.param)
        self._core.hooks.attach(self)
        return OpenSessionReply(success=True)

    def close(
        self,
        message: CloseSession,
        now: float,
    ) -> CloseSessionReply:
        self._close_late(now)
        id = message.session_id
        name = session_name(message.owner, id)
        if name not in self.feature:
            why_not = f"there is no session {id!r}: it was never opened, or it has been closed"
            log.warning("not_closed", session=id, reason=why_not)
            return CloseSessionReply(success=False, message=why_not)
        is_gone = self.feature.close(name)
        later = "" if is_gone else "it is closed when its running requests have ended"
        return CloseSessionReply(success=True, message=later)

    def keep(
        self,
        message: KeepSessions,
        now: float,
    ) -> KeepSessionsReply:
        """Take sessions that an earlier engine had, and tell all changes from now on."""
        self.feature.ledger.is_kept = True
        refused = []
        for kept in message.sessions:
            why_not = self.feature.restore(kept, now)
            if why_not:
                refused.append(why_not)
        if len(self.feature):
            self._core.hooks.attach(self)
        return KeepSessionsReply(refused=refused)

    def told_first(
        self,
        reply: R,
        call: int,
    ) -> R | None:
        """The reply; None if changes are told before it, so that it comes with them."""
        if not self.feature.ledger.is_kept:
            return reply
        self._tell_changes()
        self._core.send(msgspec.structs.replace(reply, call=call))
        return None

    def begin_turn(
        self,
        message: GenerateRequest,
        now: float,
    ) -> Refusal | None:
        """Find the turn of a request in its session. Returns why there is none."""
        assert message.session is not None
        self._begun = None
        self._close_late(now)
        try:
            self._begun = self.feature.begin(
                message, message.session, self._core.scheduler.limits.max_len
            )
        except TurnRefused as exc:
            return exc.refusal
        return None

    def with_history(
        self,
        message: GenerateRequest,
    ) -> GenerateRequest:
        """The request with the history of its session before its prompt. It must not be refused."""
        assert self._begun is not None, "the request was not looked at"
        return self._begun.message

    def enter_turn(
        self,
        message: GenerateRequest,
        now: float,
    ) -> None:
        """The request is open: enter its turn. Turns that it replaces end."""
        begun = self._begun
        self._begun = None
        assert begun is not None, "the request was not looked at"
        detail = _describe(begun, now)
        replaced = self.feature.enter(begun, now)
        self._core.note(message.id, EventKind.SESSION, detail, now)
        if replaced:
            why = f"the turn {message.rid!r} of its session replaces it"
            self._core.scheduler.abort(Abort(ids=replaced, message=why))

    def filter_output(
        self,
        output: StepOutput,
    ) -> StepOutput | None:
        """Tell what the output ends before the output."""
        self._tell_changes()
        return output

    def after_step(
        self,
        now: float,
    ) -> None:
        """Close sessions that have been idle for too long, and note KV that was evicted."""
        self._close_late(now)
        scheduler = self._core.scheduler
        for lost in scheduler.kv.pins.take_lost():
            self.feature.dropped(Dropped(lost, scheduler.planner.num_steps, now))
        self._tell_changes()
        if not len(self.feature):
            self._core.hooks.detach(self)

    def _tell_changes(self) -> None:
        changes = self.feature.ledger.take()
        if changes:
            self._core.send(SessionChanges(changes=changes))

    def _close_late(
        self,
        now: float,
    ) -> None:
        for id in self.feature.expire(now):
            log.info("timed_out", session=id)


def _describe(
    begun: Begun,
    now: float,
) -> str:
    """The turn in words, for the history of its request."""
    turn = begun.turn
    session = turn.session
    detail = (
        f"turn {session.num_turns + 1:,} of {session.id!r}: {turn.start:,} tokens of history, "
        f"{turn.prompt_len - turn.start:,} new"
    )
    dropped = session.dropped
    if dropped is None:
        return detail
    lost = dropped.lost
    ago_s = now - dropped.time_s
    return (
        f"{detail}; KV of {lost.num_tokens:,} was dropped before step {dropped.step:,}, "
        f"{ago_s:.3f} s ago: {lost.why}"
    )
