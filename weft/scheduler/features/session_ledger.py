"""What has changed in sessions since somebody asked, for a copy of them outside of the engine; and
sessions from such a copy.

While nobody keeps a copy, nothing is noted. The ledger knows no clock and no store.
"""

from __future__ import annotations

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.sessions import KeptSession, KeptTurn, SessionChange
from weft.scheduler.features.turns import Session, SessionTurn


class _Noted:
    """The changes of one session."""

    def __init__(self) -> None:
        self.is_new = False
        self.is_closed = False
        self.turns: dict[str, SessionTurn] = {}  # turns that have ended, or were cut
        self.forgotten: dict[str, None] = {}


class SessionLedger:
    """The changes that were not taken. Costs nothing before `is_kept`."""

    def __init__(self) -> None:
        self.is_kept = False
        self._noted: dict[Session, _Noted] = {}

    def opened(
        self,
        session: Session,
    ) -> None:
        if self.is_kept:
            self._of(session).is_new = True

    def used(
        self,
        session: Session,
    ) -> None:
        if self._is_noted(session):
            self._of(session)

    def given(
        self,
        turn: SessionTurn,
    ) -> None:
        """The tokens of a turn that has ended are known."""
        if self._is_noted(turn.session):
            noted = self._of(turn.session)
            noted.turns[turn.name] = turn
            noted.forgotten.pop(turn.name, None)

    def forgotten(
        self,
        turn: SessionTurn,
    ) -> None:
        if self._is_noted(turn.session):
            noted = self._of(turn.session)
            noted.turns.pop(turn.name, None)
            noted.forgotten[turn.name] = None

    def closed(
        self,
        session: Session,
    ) -> None:
        """It takes no more requests, even if it still has some."""
        if self.is_kept:
            noted = self._of(session)
            noted.is_closed = True
            # Behind what was noted of others: another session may get the same name now.
            self._noted[session] = self._noted.pop(session)

    def take(self) -> list[SessionChange]:
        """The changes since the last call, in their order."""
        if not self._noted:
            return []
        taken = self._noted
        self._noted = {}
        return [_change(session, noted) for session, noted in taken.items()]

    def _is_noted(
        self,
        session: Session,
    ) -> bool:
        return self.is_kept and not session.is_closing

    def _of(
        self,
        session: Session,
    ) -> _Noted:
        noted = self._noted.get(session)
        if noted is None:
            noted = self._noted[session] = _Noted()
        return noted


def _change(
    session: Session,
    noted: _Noted,
) -> SessionChange:
    turns = [] if noted.is_closed else [_kept(turn) for turn in noted.turns.values()]
    last = session.last
    kept = KeptSession(
        id=session.id,
        owner=session.owner,
        capacity=session.capacity,
        timeout_s=session.timeout_s,
        num_turns=session.num_turns,
        last="" if last is None else last.name,
        turns=turns,
    )
    return SessionChange(
        session=kept,
        is_new=noted.is_new,
        is_closed=noted.is_closed,
        forgotten=list(noted.forgotten),
    )


def _kept(turn: SessionTurn) -> KeptTurn:
    return KeptTurn(
        name=turn.name,
        parent="" if turn.parent is None else turn.parent.name,
        start=turn.start,
        prompt_len=turn.prompt_len,
        tokens=turn.tokens,
    )


def session_from(
    kept: KeptSession,
    max_tokens: int,
    longest_s: float,
    now: float,
) -> Session | None:
    """The session of a copy, within the limits of now; None without the turn that ended last.

    A turn that does not fit its parent is left out, with all that continue it: a conversation is
    never continued with a hole in it.
    """
    timeout_s = kept.timeout_s
    if longest_s:
        timeout_s = min(timeout_s or longest_s, longest_s)
    session = Session(
        kept.id, kept.owner, min(kept.capacity, max_tokens), timeout_s, now - kept.idle_s
    )
    session.num_turns = kept.num_turns
    for one in kept.turns:
        parent = session.turns.get(one.parent)
        shared = 0 if parent is None else parent.length
        has_parent = parent is not None or not one.parent
        num_own = len(one.tokens) // TOKEN_BYTES
        if has_parent and 0 <= one.start <= shared and 0 <= one.prompt_len - one.start <= num_own:
            _add(session, one, parent)
    session.last = session.turns.get(kept.last)
    return None if session.last is None and kept.last else session


def _add(
    session: Session,
    one: KeptTurn,
    parent: SessionTurn | None,
) -> None:
    # No open request has this id, so no message can mean this turn by it.
    turn = SessionTurn(-1, one.name, session, parent, one.start, one.tokens, 0)
    turn.prompt_len = one.prompt_len
    turn.is_open = False
    if parent is not None:
        parent.children.append(turn)
    session.turns[turn.name] = turn
    session.num_tokens += turn.num_charged
