"""Sessions: the engine remembers conversations, so that a request brings only its new tokens.

The prompt of a session's request is the history followed by its own prompt; otherwise it is an
ordinary request. A request that has ended in tokens (by a stop, or by length) is a turn that others
can continue; an aborted or failed one leaves no trace. The full pages of KV of the turn that ended
last are pinned in the prefix cache until their memory is needed (`memory/accounting/pins.py`), so a
session never keeps a request from running."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import msgspec

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import InvalidParam
from weft.messages.sessions import KeptSession, SessionParams
from weft.scheduler.feature import Feature
from weft.scheduler.features.session_ledger import SessionLedger, session_from
from weft.scheduler.features.turns import (
    Dropped,
    Session,
    SessionTurn,
    TurnRefused,
    session_name,
    shared_len,
)
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request
from weft.scheduler.settings import SessionLimits


class Begun(NamedTuple):
    """A request that will become a turn if it can be queued."""

    message: GenerateRequest  # with the whole prompt
    turn: SessionTurn
    replaced: list[SessionTurn]  # turns that the session will forget for it


class Sessions(Feature):
    """All open sessions, and the turns whose requests run."""

    request_fields = ("session",)

    def __init__(
        self,
        limits: SessionLimits,
    ) -> None:
        self._limits = limits
        self.by_name: dict[str, Session] = {}  # open sessions
        self._by_id: dict[int, SessionTurn] = {}  # turns by the id of their request
        self.due_s = math.inf  # no session has been idle for too long before this time
        self.ledger = SessionLedger()
        self._num_of = Counter[str]()  # open sessions by owner

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(
        self,
        name: str,
    ) -> bool:
        return name in self.by_name

    def session_of(
        self,
        request_id: int,
    ) -> str:
        """The session of an open request; empty if it has none."""
        turn = self._by_id.get(request_id)
        return turn.session.id if turn is not None and turn.is_open else ""

    # Sessions come and go

    def open(
        self,
        id: str,
        capacity: int,
        timeout_s: float,
        now: float,
        owner: str = "",
    ) -> None:
        """Open a session. Raises `InvalidParam` with the field of `OpenSession` that is wrong;
        empty: there is no room for another session."""
        limits = self._limits
        if not id:
            raise InvalidParam("session_id", "a session needs an id")
        if session_name(owner, id) in self.by_name:
            raise InvalidParam("session_id", f"the session {id!r} is open already")
        if not 0 <= capacity <= limits.max_tokens:
            raise InvalidParam(
                "capacity",
                f"the capacity is {capacity:,} tokens; 1 to {limits.max_tokens:,} are allowed",
            )
        longest_s = limits.timeout_s or math.inf
        if not 0 <= timeout_s <= longest_s:
            raise InvalidParam(
                "timeout_s",
                f"the timeout is {timeout_s:g} s; at most {longest_s:g} s are allowed",
            )
        why_not = self._why_full(owner)
        if why_not:
            raise InvalidParam("", why_not)
        session = Session(
            id, owner, capacity or limits.max_tokens, timeout_s or limits.timeout_s, now
        )
        self._add(session)
        self.ledger.opened(session)

    def restore(
        self,
        kept: KeptSession,
        now: float,
    ) -> str:
        """Open a session that an earlier engine had, with its turns. Returns why not; empty if it
        is open."""
        limits = self._limits
        if session_name(kept.owner, kept.id) in self.by_name:
            return f"the session {kept.id!r} is open already"
        why_not = self._why_full(kept.owner)
        if why_not:
            return why_not
        session = session_from(kept, limits.max_tokens, limits.timeout_s, now)
        if session is None:
            return f"the turn {kept.last!r}, the last one of the session {kept.id!r}, is missing"
        self._add(session)
        return ""

    def close(
        self,
        name: str,
    ) -> bool:
        """Close a session, at once or when its last running request ends.

        Returns whether it is closed now.
        """
        session = self.by_name[name]
        session.is_closing = True
        self.ledger.closed(session)
        return self._close_if_idle(session)

    def expire(
        self,
        now: float,
    ) -> list[str]:
        """Close the sessions that have been idle for too long.

        Returns their ids.
        """
        late = []
        if now >= self.due_s:
            ends = {session: _end_s(session, now) for session in self.by_name.values()}
            late = [session for session, end_s in ends.items() if end_s <= now]
            for session in late:
                self._remove(session)
            self.due_s = min((end_s for end_s in ends.values() if end_s > now), default=math.inf)
        return [session.id for session in late]

    def dropped(
        self,
        dropped: Dropped,
    ) -> None:
        """Note that the KV of a session was evicted."""
        session = self.by_name.get(dropped.lost.name)
        if session is not None:
            session.dropped = dropped

    # Requests

    def begin(
        self,
        message: GenerateRequest,
        params: SessionParams,
        max_len: int,
    ) -> Begun:
        """Turn a request of a session into one with the whole prompt. Changes nothing; `enter`
        does, after the request is queued.

        `max_len`: the longest prompt and output together, in tokens. Raises TurnRefused.
        """
        session = self.by_name.get(session_name(params.owner, params.id))
        if session is None:
            raise TurnRefused(
                f"there is no session {params.id!r}: it was never opened, or it has been closed",
                404,
            )
        if session.is_closing:
            raise TurnRefused(f"the session {params.id!r} is being closed", 409)
        parent = session.parent_of(params)
        replaced = _replaced(session, parent) if params.replace else []
        if message.rid in session.turns and session.turns[message.rid] not in replaced:
            raise TurnRefused(f"session {params.id!r} has a turn {message.rid!r} already", 400)
        if len(session.turns) - len(replaced) >= self._limits.max_turns:
            raise TurnRefused(
                f"session {params.id!r} has {len(session.turns):,} turns, "
                "as many as --max-session-turns allows",
                400,
            )
        start = shared_len(parent, params)
        history = b"" if parent is None else parent.history(start)
        own = message.input_ids[: len(message.input_ids) // TOKEN_BYTES * TOKEN_BYTES]
        if (
            history
            and params.bos_token_id is not None
            and own[:TOKEN_BYTES] == _packed(params.bos_token_id)
        ):
            own = own[TOKEN_BYTES:]
        room = session.capacity - session.num_tokens + sum(turn.num_charged for turn in replaced)
        max_new = _max_new(message, session, room, len(own) // TOKEN_BYTES, max_len - start)
        return Begun(
            msgspec.structs.replace(
                message,
                input_ids=history + own,
                sampling=msgspec.structs.replace(message.sampling, max_new_tokens=max_new),
            ),
            SessionTurn(message.id, message.rid, session, parent, start, own, max_new),
            replaced,
        )

    def enter(
        self,
        begun: Begun,
        now: float,
    ) -> tuple[int, ...]:
        """Enter the turn of a request that was queued.

        Returns the ids of open requests that it replaces: the caller must end them.
        """
        turn, session = begun.turn, begun.turn.session
        for old in begun.replaced:
            self._forget(old)
        if session.last is not None and session.last.name not in session.turns:
            session.last = turn.parent
        if turn.parent is not None:
            turn.parent.children.append(turn)
        session.turns[turn.name] = self._by_id[turn.id] = turn
        session.num_tokens += turn.num_charged
        session.num_open += 1
        session.num_turns += 1
        session.used_s = now
        session.dropped = None
        if session.pin is not None:
            session.pin.touch()
        self.ledger.used(session)
        return tuple(old.id for old in begun.replaced if old.is_open)

    def cut(
        self,
        ids: tuple[int, ...],
        output_lens: tuple[int, ...],
    ) -> None:
        """The front has found the end of these requests after `output_lens` output tokens. Later
        tokens do not count."""
        for id, output_len in zip(ids, output_lens, strict=False):
            turn = self._by_id.get(id)
            if turn is None:
                continue
            if turn.is_open:
                turn.output_len = output_len
            elif not turn.children:
                self._give(
                    turn, turn.tokens[: (turn.prompt_len - turn.start + output_len) * TOKEN_BYTES]
                )

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        kv: KvMemory,
    ) -> None:
        turn = self._by_id.get(request.id)
        if turn is None:
            return
        session = turn.session
        turn.is_open = False
        session.num_open -= 1
        session.used_s = now
        if turn.is_forgotten or (turn.output_len is None and reason not in ("stop", "length")):
            self._forget(turn)
        else:
            end = (
                None
                if turn.output_len is None
                else (turn.prompt_len + turn.output_len) * TOKEN_BYTES
            )
            self._give(turn, request.packed[turn.start * TOKEN_BYTES : end])
            session.last = turn
            before, session.pin = (
                session.pin,
                kv.pins.keep(session.name, request.cache_key(request.packed[:end])),
            )
            if before is not None:
                before.drop()
        self._close_if_idle(session)

    # Inside

    def _why_full(
        self,
        owner: str,
    ) -> str:
        """Why this owner cannot have another session; empty if he can."""
        limits = self._limits
        if len(self.by_name) >= limits.max_sessions:
            return f"{len(self.by_name):,} sessions are open, as many as --max-sessions allows"
        num_own = self._num_of[owner]
        if owner and 0 < limits.max_per_owner <= num_own:
            return (
                f"{num_own:,} sessions of this key are open, "
                "as many as --max-sessions-per-key allows"
            )
        return ""

    def _add(
        self,
        session: Session,
    ) -> None:
        self.by_name[session.name] = session
        self._num_of[session.owner] += 1
        self.due_s = min(self.due_s, session.used_s + (session.timeout_s or math.inf))

    def _give(
        self,
        turn: SessionTurn,
        tokens: bytes,
    ) -> None:
        """Set the turn's own tokens, and charge it for no more than these."""
        turn.tokens = tokens
        num_tokens = len(tokens) // TOKEN_BYTES
        turn.session.num_tokens += num_tokens - turn.num_charged
        turn.num_charged = num_tokens
        self.ledger.given(turn)

    def _forget(
        self,
        turn: SessionTurn,
    ) -> None:
        """Remove a turn from its session; an open turn is charged until its request has ended."""
        session = turn.session
        if not turn.is_forgotten:
            turn.is_forgotten = True
            del session.turns[turn.name]
            self.ledger.forgotten(turn)
            if turn.parent is not None:
                turn.parent.children.remove(turn)
        if not turn.is_open:
            session.num_tokens -= turn.num_charged
            if self._by_id.get(turn.id) is turn:
                del self._by_id[turn.id]

    def _close_if_idle(
        self,
        session: Session,
    ) -> bool:
        if session.is_closing and not session.num_open:
            self._remove(session)
            return True
        return False

    def _remove(
        self,
        session: Session,
    ) -> None:
        for turn in session.turns.values():
            if self._by_id.get(turn.id) is turn:
                del self._by_id[turn.id]
        if session.pin is not None:
            session.pin.drop()
        del self.by_name[session.name]
        self._num_of[session.owner] -= 1
        if not self._num_of[session.owner]:
            del self._num_of[session.owner]
        self.ledger.closed(session)


def _replaced(
    session: Session,
    parent: SessionTurn | None,
) -> list[SessionTurn]:
    """The turns to forget when a request continues `parent`, or starts again: parents before their
    children."""
    return list(session.turns.values()) if parent is None else list(parent.followers())


def _max_new(
    message: GenerateRequest, session: Session, room: int, num_own: int, fitting: int
) -> int:
    """The number of tokens that the turn may generate. Raises TurnRefused if its session lacks
    room.

    `room`: tokens left of the capacity; `fitting`: the turn's own tokens for which the context has
    room.
    """
    asked = message.sampling.max_new_tokens
    wanted = 1 if asked is None else asked
    if num_own + wanted > room:
        raise TurnRefused(
            f"session {session.id!r} has room for {max(room, 0):,} "
            f"of its {session.capacity:,} tokens; "
            f"{num_own:,} come in and {wanted:,} are to be generated",
            400,
        )
    return max(1, min(room, fitting) - num_own) if asked is None else asked


def _end_s(
    session: Session,
    now: float,
) -> float:
    """When the session will have been idle for too long, if no request uses it any more."""
    if not session.timeout_s:
        return math.inf
    return (now if session.num_open else session.used_s) + session.timeout_s


def _packed(token: int) -> bytes:
    return token.to_bytes(TOKEN_BYTES, "little", signed=True)
