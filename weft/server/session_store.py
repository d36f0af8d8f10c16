"""Sessions on the disk: the changes that the engine tells become records, and the records become
sessions of the next engine.

A session has a record with one part for itself and one for each of its turns. Its history consists
of token ids, so it continues only with the tokenizer that made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.client.client import EngineClient
from weft.messages.sessions import (
    KeepSessions,
    KeptSession,
    KeptTurn,
    SessionChange,
    SessionChanges,
)
from weft.observe.log import EventLog
from weft.state.store import RecordPart, StateStore

KIND = "session"
TURN = "turn "  # begins the names of parts that are turns
MESSAGE_BYTES = 8_000_000  # of history in one message to the engine
MESSAGE_SESSIONS = 256
RESTORE_TIMEOUT_S = 60.0

log = EventLog("sessions")


class SessionHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session without its turns."""

    tokenizer: str
    capacity: int
    timeout_s: float
    num_turns: int = 0
    last: str = ""


_head = msgspec.msgpack.Decoder(SessionHead)
_turn = msgspec.msgpack.Decoder(KeptTurn)


class SessionStore:
    """The sessions of one server. `tokenizer` is a name for what its token ids mean."""

    def __init__(
        self,
        state: StateStore,
        tokenizer: str,
    ) -> None:
        self._state = state
        self._tokenizer = tokenizer

    def note(
        self,
        changes: SessionChanges,
    ) -> None:
        for change in changes.changes:
            self._note(change)

    def require_room(self) -> None:
        """Before a session is opened. Raises StateError."""
        self._state.require_room()

    async def settled(self) -> None:
        """Wait until all noted changes are on disk. Raises StateError."""
        await self._state.settled()

    async def restore(
        self,
        client: EngineClient,
    ) -> None:
        """Give the engine all stored sessions, the last used one first; from then on it tells their
        changes."""
        found = await self._sessions()
        num_restored = 0
        refused: list[str] = []
        for group in _groups(found):
            reply = await client.call(KeepSessions(sessions=group), RESTORE_TIMEOUT_S)
            refused += reply.refused
            num_restored += len(group) - len(reply.refused)
        if refused:
            log.warning("not_restored", sessions=len(refused), reason=refused[0])
        if num_restored:
            log.info("restored", sessions=num_restored)

    async def names(
        self,
        older_than_s: float,
    ) -> list[tuple[str, str]]:
        """Owner and id of the sessions that nobody has used for so long."""
        return await self._state.unused(KIND, older_than_s)

    def forget(
        self,
        owner: str,
        id: str,
    ) -> None:
        """Remove a session that no engine has."""
        self._state.delete(KIND, owner, id)

    def _note(
        self,
        change: SessionChange,
    ) -> None:
        session = change.session
        owner = session.owner
        id = session.id
        if change.is_closed:
            self._state.delete(KIND, owner, id)
            return
        head = SessionHead(
            tokenizer=self._tokenizer,
            capacity=session.capacity,
            timeout_s=session.timeout_s,
            num_turns=session.num_turns,
            last=session.last,
        )
        parts = {"": msgspec.msgpack.encode(head)}
        for turn in session.turns:
            parts[TURN + turn.name] = msgspec.msgpack.encode(turn)
        forgotten = [TURN + name for name in change.forgotten]
        self._state.put(KIND, owner, id, parts, without=forgotten, is_new=change.is_new)

    async def _sessions(self) -> list[KeptSession]:
        """The stored sessions that continue here, the last used one first. Those that have timed
        out are removed."""
        now = self._state.clock()
        heads: dict[tuple[str, str], tuple[RecordPart, SessionHead]] = {}
        turns: dict[tuple[str, str], list[KeptTurn]] = {}
        for part in await self._state.read_later(KIND):
            key = (part.owner, part.name)
            if part.part:
                turns.setdefault(key, []).append(_turn.decode(part.body))
            else:
                heads[key] = (part, _head.decode(part.body))
        found: list[KeptSession] = []
        num_foreign = 0
        for key, (part, head) in heads.items():
            idle_s = max(now - part.used_s, 0.0)
            if head.timeout_s and idle_s > head.timeout_s:
                self._state.delete(KIND, *key)
            elif head.tokenizer != self._tokenizer:
                num_foreign += 1
            else:
                found.append(
                    KeptSession(
                        id=part.name,
                        owner=part.owner,
                        capacity=head.capacity,
                        timeout_s=head.timeout_s,
                        idle_s=idle_s,
                        num_turns=head.num_turns,
                        last=head.last,
                        turns=turns.get(key, []),
                    )
                )
        if num_foreign:
            reason = (
                "they belong to a model with another tokenizer; weft ctl state prune removes them"
            )
            log.warning("not_restored", sessions=num_foreign, reason=reason)
        found.sort(key=lambda session: session.idle_s)
        return found


def _groups(sessions: Sequence[KeptSession]) -> Iterator[list[KeptSession]]:
    """The sessions in groups for one message each. At least one group, which may be empty."""
    group: list[KeptSession] = []
    num_bytes = 0
    for session in sessions:
        size = sum(len(turn.tokens) for turn in session.turns)
        if group and (num_bytes + size > MESSAGE_BYTES or len(group) >= MESSAGE_SESSIONS):
            yield group
            group = []
            num_bytes = 0
        group.append(session)
        num_bytes += size
    yield group
