"""The history of one session: a tree of turns. Each turn has its own tokens, after those that it
shares with its parent.

    parent   | prompt ............. | output .... |
    turn     | .... start .... | prompt | output  |       (usually `start` is the parent's end)

A turn is one request. This module knows token ids, but no Request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.memory.accounting.pins import LostPin, Pin
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.sessions import SessionParams
from weft.scheduler.limits import Refusal


class TurnRefused(Exception):
    """A request cannot be a turn of its session."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.refusal = Refusal(message, status)


class SessionTurn:
    """One request of a session, from its arrival on."""

    __slots__ = (
        *("id", "name", "session", "parent", "children", "start", "tokens", "prompt_len"),
        *("num_charged", "output_len", "is_open", "is_forgotten"),
    )

    def __init__(
        self,
        id: int,
        name: str,
        session: Session,
        parent: SessionTurn | None,
        start: int,
        tokens: bytes,
        max_new: int,
    ) -> None:
        self.id = id  # of the request
        self.name = name  # its rid
        self.session = session
        self.parent = parent
        self.children: list[SessionTurn] = []
        self.start = start  # tokens that it shares with its parent
        self.tokens = (
            # int32, packed: its own tokens after the shared ones; the output is added at its end
            tokens
        )
        self.prompt_len = start + len(tokens) // TOKEN_BYTES
        self.num_charged = self.prompt_len - start + max_new  # against the session's capacity
        # output tokens that count, if the front has found the end
        self.output_len: int | None = None
        self.is_open = True  # its request has not ended
        self.is_forgotten = False  # replaced while its request was open

    @property
    def length(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    def history(self, end: int) -> bytes:
        """The first `end` tokens of the conversation up to this turn, packed."""
        pieces = []
        turn: SessionTurn | None = self
        while turn is not None and end:
            if end > turn.start:
                pieces.append(turn.tokens[: (end - turn.start) * TOKEN_BYTES])
                end = turn.start
            turn = turn.parent
        pieces.reverse()
        return b"".join(pieces)

    def followers(self) -> Iterator[SessionTurn]:
        """All turns below this one, parents before children."""
        stack = list(self.children)
        while stack:
            turn = stack.pop()
            yield turn
            stack.extend(turn.children)


class Dropped(NamedTuple):
    """KV of a session that was evicted."""

    lost: LostPin
    step: int  # the next step
    time_s: float


def session_name(owner: str, id: str) -> str:
    """The name of a session among those of all owners. Ids and owners' names are printable."""
    return f"{owner}\x1f{id}" if owner else id


class Session:
    """One conversation, and its limits. `sessions.py` writes it."""

    def __init__(self, id: str, owner: str, capacity: int, timeout_s: float, now: float) -> None:
        self.id = id
        self.owner = owner
        self.name = session_name(owner, id)
        self.capacity = capacity  # tokens of all its turns together
        self.timeout_s = timeout_s  # 0: never
        self.used_s = now
        self.turns: dict[str, SessionTurn] = {}  # by name, without forgotten ones
        self.last: SessionTurn | None = None  # the turn that ended last
        self.num_tokens = 0  # charged by its turns
        self.num_open = 0  # turns whose request has not ended, including forgotten ones
        self.num_turns = 0  # number of turns since the session was opened
        self.is_closing = False
        self.pin: Pin | None = None  # on the KV of `last`
        self.dropped: Dropped | None = None  # set if that KV was evicted since the last turn began

    def parent_of(self, params: SessionParams) -> SessionTurn | None:
        """The turn that a request continues.

        Raises TurnRefused if there is no such turn, or if it has not ended.
        """
        if not params.rid:
            if params.replace:
                return None
            running = next((turn.name for turn in self.turns.values() if turn.is_open), None)
            if running is not None:
                raise TurnRefused(
                    f"the turn {running!r} of session {self.id!r} is still running; "
                    "name the one to continue as rid",
                    409,
                )
            return self.last
        turn = self.turns.get(params.rid)
        if turn is None:
            there = (
                f"the last one is {self.last.name!r}"
                if self.last is not None
                else "it has none that has ended"
            )
            raise TurnRefused(f"session {self.id!r} has no turn {params.rid!r}; {there}", 400)
        if turn.is_open:
            raise TurnRefused(
                f"the turn {turn.name!r} of session {self.id!r} is still running", 409
            )
        return turn


def shared_len(parent: SessionTurn | None, params: SessionParams) -> int:
    """How many tokens of its parent's conversation a turn keeps.

    Raises TurnRefused if there are not so many.
    """
    if parent is None:
        return 0
    length = parent.prompt_len if params.drop_previous_output else parent.length
    if abs(params.offset) > length:
        raise TurnRefused(
            f"offset is {params.offset:,}; {parent.name!r} has {length:,} tokens of history", 400
        )
    return params.offset if params.offset > 0 else length + params.offset
