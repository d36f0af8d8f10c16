"""Handoff: one server computes prompts and lends their KV, another one takes it and goes on.

    prefill   expect ─▶ lend ─▶ (asked for, read) ─▶ Renewed ... Returned, or withdraw
              expect ─▶ refuse
    decode    ask ─▶ FoundKv ─▶ bind, fetch ─▶ Landed ─▶ leave
              ask ─▶ Missed

No call waits for the other server, and none raises. What it says comes with `take`. Twins:
`weft/handoff/` (TCP), the journal's replay, `NoHandoff`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import Landed


class MeetingPlace(NamedTuple):
    """A room of another server."""

    host: str
    port: int
    room: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class FoundKv(NamedTuple):
    """The other server has computed a prompt."""

    pull: int
    num_tokens: int  # of the key that was asked for, whole pages


class Missed(NamedTuple):
    """The other server gives nothing, or nothing more."""

    pull: int
    reason: str  # one of `config.handoff.REASONS`
    message: str  # for people


class HandoffNews(NamedTuple):
    """What has happened since the last call of `take`."""

    renewed: tuple[str, ...] = ()  # rooms that are still waited for
    returned: tuple[str, ...] = ()  # rooms that nobody needs any more
    found: tuple[FoundKv, ...] = ()
    landed: tuple[Landed, ...] = ()
    missed: tuple[Missed, ...] = ()


NOTHING_NEW = HandoffNews()


class HandoffReport(NamedTuple):
    """Numbers for people. Nothing is decided by them."""

    num_bytes: int = 0  # that were sent, or have come, since the start
    num_connections: int = 0  # since the start
    faults: int = 0  # connections that were refused, or broke off, and pages that were damaged


class Handoff(Protocol):
    """Called from one thread."""

    # The server that computes prompts

    def expect(self, room: str) -> None:
        """A request of this room is open here: whoever asks is to wait."""
        ...

    def lend(self, room: str, key: CacheKey, pages: IntArray) -> None:
        """Let `pages` [n] be read, which hold the KV of `key` and do not change until they are
        withdrawn."""
        ...

    def refuse(self, room: str, why: str) -> None:
        """The prompt of a room that was expected will not be lent."""
        ...

    def withdraw(self, room: str, why: str) -> None:
        """The pages of a room are read no more once this returns."""
        ...

    # The server that takes them

    def ask(self, pull: int, place: MeetingPlace, key: CacheKey, have: int) -> None:
        """Ask for the KV of `key`, of which the first `have` tokens are here. Comes to `FoundKv` or
        `Missed`."""
        ...

    def bind(self, ticket: int, pull: int) -> None:
        """The transfer `ticket` will be part of `pull`."""
        ...

    def leave(self, pull: int) -> None:
        """Nothing more of it is needed."""
        ...

    def dismiss(self, place: MeetingPlace) -> None:
        """Nothing of a room is needed, and nothing was asked."""
        ...

    # As of a store (`memory/tiers/protocol.py`)

    def fetch(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        """Read the tokens of `key` from `start` on into pages [n]. They belong to the ticket until
        it has landed."""
        ...

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def cancel(self, ticket: int) -> None:
        """End a transfer: nothing is written into its pages any more once this returns. It will
        still land."""
        ...

    def flush(self) -> None:
        """Nothing is kept that could be found later."""
        ...

    # Both

    def renew(self, why: str) -> None:
        """The weights here are others from now on. What was asked, on either side, comes to
        nothing; what is asked later meets the new ones. `why` is for people."""
        ...

    def take(self) -> HandoffNews: ...

    def report(self) -> HandoffReport: ...


class NoHandoff:
    """There is no other server."""

    def expect(self, room: str) -> None:
        pass

    def lend(self, room: str, key: CacheKey, pages: IntArray) -> None:
        pass

    def refuse(self, room: str, why: str) -> None:
        pass

    def withdraw(self, room: str, why: str) -> None:
        pass

    def ask(self, pull: int, place: MeetingPlace, key: CacheKey, have: int) -> None:
        pass

    def bind(self, ticket: int, pull: int) -> None:
        pass

    def leave(self, pull: int) -> None:
        pass

    def dismiss(self, place: MeetingPlace) -> None:
        pass

    def fetch(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        pass

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        raise AssertionError("nothing is stored by another server")

    def cancel(self, ticket: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def renew(self, why: str) -> None:
        pass

    def take(self) -> HandoffNews:
        return NOTHING_NEW

    def report(self) -> HandoffReport:
        return HandoffReport()
