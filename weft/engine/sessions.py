"""Messages about sessions, and requests that belong to one: between the control handlers and `parts/sessions.py`."""

from __future__ import annotations

from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
    SessionParams,
)
from weft.observe.log import EventLog
from weft.scheduler.features.sessions import Begun, Sessions
from weft.scheduler.features.turns import Dropped, TurnRefused, session_name
from weft.scheduler.history.request_history import Event, EventKind
from weft.scheduler.scheduler import Scheduler

log = EventLog("sessions")


def open_session(sessions: Sessions, message: OpenSession, now: float) -> OpenSessionReply:
    _close_late(sessions, now)
    why_not = sessions.open(
        message.session_id, message.capacity, message.timeout_s, now, message.owner
    )
    if why_not:
        log.warning("not_opened", session=message.session_id, reason=why_not)
    return OpenSessionReply(success=not why_not, message=why_not)


def close_session(sessions: Sessions, message: CloseSession, now: float) -> CloseSessionReply:
    _close_late(sessions, now)
    id, name = message.session_id, session_name(message.owner, message.session_id)
    if name not in sessions:
        why_not = f"there is no session {id!r}: it was never opened, or it has been closed"
        log.warning("not_closed", session=id, reason=why_not)
        return CloseSessionReply(success=False, message=why_not)
    is_gone = sessions.close(name)
    later = "" if is_gone else "it is closed when its running requests have ended"
    return CloseSessionReply(success=True, message=later)


def generate(
    sessions: Sessions,
    scheduler: Scheduler,
    message: GenerateRequest,
    params: SessionParams,
    now: float,
) -> None:
    """Queue a request behind the history of its session, or refuse it."""
    _close_late(sessions, now)
    try:
        begun = sessions.begin(message, params, scheduler.max_len)
    except TurnRefused as exc:
        scheduler.add_request(message, now, exc.refusal)
        return
    is_new = message.id not in scheduler.requests
    scheduler.add_request(begun.message, now)
    if not is_new or message.id not in scheduler.requests:
        return  # its number is taken, or it can never run
    told = _told(begun, now)
    replaced = sessions.enter(begun, now)
    scheduler.history.note(message.id, Event(now, scheduler.num_steps, EventKind.SESSION, told))
    if replaced:
        scheduler.abort(
            Abort(ids=replaced, message=f"the turn {message.rid!r} of its session replaces it")
        )


def look_after(sessions: Sessions, scheduler: Scheduler, now: float) -> None:
    """After a step: close what has been idle for too long, and take note of KV that had to go."""
    _close_late(sessions, now)
    for lost in scheduler.kv.pins.take_lost():
        sessions.dropped(Dropped(lost, scheduler.num_steps, now))


def _close_late(sessions: Sessions, now: float) -> None:
    for id in sessions.expire(now):
        log.info("timed_out", session=id)


def _told(begun: Begun, now: float) -> str:
    turn, session = begun.turn, begun.turn.session
    told = (
        f"turn {session.num_turns + 1:,} of {session.id!r}: {turn.start:,} tokens of history, "
        f"{turn.prompt_len - turn.start:,} new"
    )
    if (dropped := session.dropped) is not None:
        lost, ago_s = dropped.lost, now - dropped.time_s
        told += f"; KV of {lost.num_tokens:,} was dropped before step {dropped.step:,}, {ago_s:.3f} s ago: {lost.why}"
    return told
