"""A client visits a server that lends KV: it waits until the room is lent, and takes pages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.handoff.news import News
from weft.handoff.pages import HandoffMemory
from weft.handoff.rooms import Room, RoomState
from weft.handoff.wire import (
    GROUP_BYTES,
    Ask,
    BadSpeech,
    Beat,
    Connection,
    Decline,
    PageGroup,
    Ready,
    Spoken,
    Wanted,
)
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey
from weft.tiers.pages import PoolPages

SEND_S = 10.0  # time in which a group of pages must be received


@dataclass(frozen=True, kw_only=True)
class LendTerms:
    """What is lent, and how long a server waits."""

    memory: HandoffMemory
    lease_s: float
    beat_s: float  # interval of `Beat` messages
    room_s: float  # time in which the request of a room must come after a client asked for it


class Visit:
    """One connection and its room."""

    def __init__(
        self,
        terms: LendTerms,
        news: News,
        connection: Connection,
        ask: Ask,
        name: str,
        room: Room,
    ) -> None:
        self._terms = terms
        self._news = news
        self._connection = connection
        self._ask = ask
        self._name = name  # of the room
        self._room = room
        self._known = 0  # tokens of the key that the room has
        self._event = asyncio.Event()
        room.woken.add(self._event)
        self._incoming: asyncio.Future[Spoken] = connection.next_message()

    def end(self) -> None:
        self._incoming.cancel()
        self._room.woken.discard(self._event)

    async def run(self) -> None:
        """Raises EOFError after the other side has closed the connection."""
        if not await self._until_lent():
            return
        room = self._room
        if self._ask.is_needless:
            return
        self._known = shared_tokens(room.lent.key, self._ask, self._terms.memory.page_size)
        if self._known <= self._ask.have:
            num_tokens = len(self._ask.tokens) // TOKEN_BYTES
            why = f"{self._known:,} of the {num_tokens:,} tokens are those of the room"
            await self._connection.send(Decline(why))
            return
        num_lent = room.lent.key.num_tokens
        if len(room.lent.resume_state) and self._known < num_lent:
            why = (
                f"only {self._known:,} of the {num_lent:,} tokens of the room are wanted, and this "
                "model can only be resumed after all of them"
            )
            await self._connection.send(Decline(why))
            return
        await self._connection.send(Ready(self._known))
        while await self._wait():
            if not self._incoming.done():
                await self._connection.send(Beat())
                continue
            message = self._incoming.result()
            if isinstance(message, Wanted):
                await self._send(message)
            elif not isinstance(message, Beat):
                raise BadSpeech(f"{type(message).__name__} instead of Wanted")
            self._listen()

    async def _until_lent(self) -> bool:
        """Returns whether the room was lent; otherwise the other side has been told why not."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._terms.room_s
        room = self._room
        while await self._wait():
            if room.state is RoomState.LENT:
                return True
            if room.state is RoomState.EXPECTED and self._ask.is_needless:
                return True
            if room.state is RoomState.UNKNOWN and loop.time() >= until_s:
                why = f"no request of the room {self._name:.64} has come"
                await self._connection.send(Decline(why))
                return False
            if self._incoming.done():
                self._incoming.result()  # raises if the other side is gone
                self._listen()
            else:
                await self._connection.send(Beat())
        return False

    async def _wait(self) -> bool:
        """Wait for an event, at most for one beat. Returns whether the room is still open."""
        room = self._room
        if room.state is RoomState.OVER:
            await self._connection.send(Decline(room.why))
            return False
        self._renew()
        changed = asyncio.ensure_future(self._event.wait())
        either: set[asyncio.Future[Any]] = {changed, self._incoming}
        try:
            await asyncio.wait(
                either,
                timeout=self._terms.beat_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()
        self._event.clear()
        if self._room.state is RoomState.OVER:
            await self._connection.send(Decline(room.why))
            return False
        return True

    def _listen(self) -> None:
        """Wait for the next message, after the last one was read."""
        self._incoming = self._connection.next_message()

    def _renew(self) -> None:
        """Report that a client still waits in the room."""
        room = self._room
        now = asyncio.get_running_loop().time()
        if room.state is RoomState.LENT and now >= room.renewed_s + self._terms.lease_s / 4:
            room.renewed_s = now
            self._news.renewed(self._name)

    async def _send(self, wanted: Wanted) -> None:
        """Send pages in groups, and the resume state. Raises GateShut when the lease ends."""
        memory = self._terms.memory
        size = memory.page_size
        if wanted.start % size or not 0 <= wanted.start <= wanted.end <= self._known:
            raise BadSpeech(f"the tokens {wanted.start:,} to {wanted.end:,} are wanted")
        room = self._room
        pages = room.lent.pages[wanted.start // size : -(-wanted.end // size)].tolist()
        # Without bytes, all layers have windows.
        at_once = max(GROUP_BYTES // max(memory.pool.page_bytes, 1), 1)
        for first in range(0, len(pages), at_once):
            await self._send_group(memory.pool, pages[first : first + at_once])
        if wanted.with_resume_state:
            if memory.resume_states is None:
                raise BadSpeech("a resume state is wanted, and there is none")
            await self._send_group(
                memory.resume_states, room.lent.resume_state.tolist(), is_resume_state=True
            )

    async def _send_group(
        self, memory: PoolPages, pages: list[int], *, is_resume_state: bool = False
    ) -> None:
        pieces: list[memoryview] = []
        for page in pages:
            pieces += memory.pieces(page)
        num_bytes = sum(map(len, pieces))
        async with asyncio.timeout(SEND_S):
            await self._connection.send(PageGroup(len(pages), num_bytes, is_resume_state))
            await self._connection.send_pages(pieces, self._room.lent.gate)
        self._news.num_bytes += num_bytes
        self._renew()


def shared_tokens(lent: CacheKey, ask: Ask, page_size: int) -> int:
    """How many tokens of the requested key are the beginning of the lent one, in whole pages."""
    if lent.namespace != ask.namespace:
        return 0
    num_tokens = min(len(lent.tokens), len(ask.tokens)) // TOKEN_BYTES
    own = np.frombuffer(lent.tokens, dtype=np.int32, count=num_tokens)
    theirs = np.frombuffer(ask.tokens, dtype=np.int32, count=num_tokens)
    different = np.flatnonzero(own != theirs)
    if len(different):
        num_tokens = int(different[0])
    return num_tokens // page_size * page_size
