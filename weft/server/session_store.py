"""Sessions on the disk: the changes that the engine tells become records, and the records become
sessions of the next engine.

A session has a record with one part for itself and one for each of its turns. Its history consists
of token ids, so it continues only with the tokenizer that made them. On a server with several
models the name of its record begins with its model: a client may have a session with the same id of
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.client.client import EngineClient
from weft.messages.sessions import (
    CloseSession,
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
OF_MODEL = "\\"  # follows a model in the name of a record; no model has it in its own
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
    """The sessions of one model. `tokenizer` is a name for what its token ids mean; `model`: its
    name on a server with several."""

    def __init__(
        self,
        state: StateStore,
        tokenizer: str,
        model: str = "",
    ) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._prefix = ""
        if model:
            # A server with one model must not take them for its own.
            self._tokenizer = f"{tokenizer}:{model}"
            self._prefix = f"{model}{OF_MODEL}"

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

    async def prune(
        self,
        client: EngineClient,
        older_than_s: float,
    ) -> int:
        """Close the sessions that nobody has used for so long, and remove those that the engine
        does not have, of other models too. Returns their number."""
        names = await self._state.unused(KIND, older_than_s)
        for owner, name in names:
            id = self._id_of(name)
            if id is not None:
                reply = await client.call(CloseSession(id, owner=owner))
                if reply.success:
                    continue  # the engine tells that it is closed
            self._state.delete(KIND, owner, name)
        return len(names)

    def _id_of(self, name: str) -> str | None:
        """The id of the session with a record of this name; None: it is of another model."""
        if not name.startswith(self._prefix):
            return None
        return name.removeprefix(self._prefix)

    def _note(
        self,
        change: SessionChange,
    ) -> None:
        session = change.session
        owner = session.owner
        name = self._prefix + session.id
        if change.is_closed:
            self._state.delete(KIND, owner, name)
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
        self._state.put(KIND, owner, name, parts, without=forgotten, is_new=change.is_new)

    async def _sessions(self) -> list[KeptSession]:
        """The stored sessions that continue here, the last used one first. Those that have timed
        out are removed."""
        now = self._state.clock()
        heads: dict[tuple[str, str], tuple[RecordPart, SessionHead]] = {}
        turns: dict[tuple[str, str], list[KeptTurn]] = {}
        for part in await self._state.read_later(KIND):
            id = self._id_of(part.name)
            if id is None:
                continue
            key = (part.owner, id)
            if part.part:
                turns.setdefault(key, []).append(_turn.decode(part.body))
            else:
                heads[key] = (part, _head.decode(part.body))
        found: list[KeptSession] = []
        num_foreign = 0
        for (owner, id), (part, head) in heads.items():
            idle_s = max(now - part.used_s, 0.0)
            if head.timeout_s and idle_s > head.timeout_s:
                self._state.delete(KIND, part.owner, part.name)
            elif head.tokenizer != self._tokenizer:
                num_foreign += 1
            else:
                found.append(
                    KeptSession(
                        id=id,
                        owner=owner,
                        capacity=head.capacity,
                        timeout_s=head.timeout_s,
                        idle_s=idle_s,
                        num_turns=head.num_turns,
                        last=head.last,
                        turns=turns.get((owner, id), []),
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
