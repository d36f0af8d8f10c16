"""Handoff: one server computes prompts and lends their KV; another one takes it and continues.

    prefill   expect ─▶ lend ─▶ (asked for, read) ─▶ Renewed ... Returned, or withdraw
              expect ─▶ refuse
    decode    ask ─▶ FoundKv ─▶ bind, fetch ─▶ Landed ─▶ leave
              ask ─▶ Missed

Where sequences have resume states (`memory/tiers/resume_states.py`), KV is of use only with its
resume state: all of what is lent is taken, or nothing.

No call waits for the other server, and none raises. `take` returns its messages. Implementations:
`weft/handoff/` (TCP), the journal's replay, `NoHandoff`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import Landed


class RoomAddress(NamedTuple):
    """A room of another server."""

    host: str
    port: int
    room: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class FoundKv(NamedTuple):
    """The other server has computed a prompt."""

    pull: int
    num_tokens: int  # tokens of the requested key, whole pages


class Missed(NamedTuple):
    """The other server has no KV, or no more."""

    pull: int
    reason: str  # one of `config.handoff.REASONS`
    message: str  # text for users


class HandoffNews(NamedTuple):
    """What has happened since the last call of `take`."""

    renewed: tuple[str, ...] = ()  # rooms for which the other server still waits
    returned: tuple[str, ...] = ()  # rooms that are not needed any more
    found: tuple[FoundKv, ...] = ()
    landed: tuple[Landed, ...] = ()
    missed: tuple[Missed, ...] = ()


NOTHING_NEW = HandoffNews()


class HandoffReport(NamedTuple):
    """Numbers for users. No decision uses them."""

    num_bytes: int = 0  # sent or received since the start
    faults: int = 0  # connections that were refused or broken, and damaged pages


class Handoff(Protocol):
    """All methods are called from one thread."""

    def close(self) -> None:
        """End all connections and threads. No method is called after this."""
        ...

    # On the server that computes prompts

    def expect(self, room: str) -> None:
        """A request of this room is open here: a server that asks for it must wait."""
        ...

    def lend(
        self, room: str, key: CacheKey, pages: IntArray, resume_state: IntArray = NO_PAGES
    ) -> None:
        """Allow reads of `pages` [n], which have the KV of `key`, and of the places [m] of its
        `resume_state` (empty: it has none). They do not change until they are withdrawn."""
        ...

    def refuse(self, room: str, why: str) -> None:
        """The prompt of an expected room will not be lent."""
        ...

    def withdraw(self, room: str, why: str) -> None:
        """When this returns, the pages of a room are not read any more."""
        ...

    # On the server that takes KV

    def ask(self, pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        """Ask for the KV of `key`, of which the first `have` tokens are here. The answer is
        `FoundKv` or `Missed`."""
        ...

    def bind(self, ticket: int, pull: int) -> None:
        """The transfer `ticket` will be part of `pull`."""
        ...

    def leave(self, pull: int) -> None:
        """The rest of the pull is not needed."""
        ...

    def dismiss(self, address: RoomAddress) -> None:
        """Nothing of a room is needed, and nothing was requested."""
        ...

    # Like a store (`memory/tiers/protocol.py`)

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        """Read the tokens of `key` from `start` on into pages [n], and its resume state into places
        [m] (empty: no resume state). All of them belong to the ticket until it has landed."""
        ...

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def cancel(self, ticket: int) -> None:
        """End a transfer. When this returns, its pages are not written any more. It will still
        land."""
        ...

    def flush(self) -> None:
        """Does nothing: no KV is kept that could be found later."""
        ...

    # On both servers

    def renew(self, why: str) -> None:
        """The weights here change now. Open transfers, on either side, fail; later ones use the new
        weights. `why` is text for users."""
        ...

    def take(self) -> HandoffNews: ...

    def report(self) -> HandoffReport: ...


class NoHandoff:
    """There is no other server."""

    def close(self) -> None:
        pass

    def expect(self, room: str) -> None:
        pass

    def lend(
        self, room: str, key: CacheKey, pages: IntArray, resume_state: IntArray = NO_PAGES
    ) -> None:
        pass

    def refuse(self, room: str, why: str) -> None:
        pass

    def withdraw(self, room: str, why: str) -> None:
        pass

    def ask(self, pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        pass

    def bind(self, ticket: int, pull: int) -> None:
        pass

    def leave(self, pull: int) -> None:
        pass

    def dismiss(self, address: RoomAddress) -> None:
        pass

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
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
