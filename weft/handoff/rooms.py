"""The rooms of a server that lends KV: each has the KV of one prompt, and the clients that wait for
it. Used by one thread only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from weft.arrays import IntArray
from weft.handoff.news import News
from weft.handoff.pages import PageGate
from weft.memory.prefix_cache import NO_PAGES, CacheKey

MAX_REMEMBERED = 4_096  # ended rooms


class RoomState(Enum):
    UNKNOWN = "unknown"  # no request has named it yet
    EXPECTED = "expected"
    LENT = "lent"
    OVER = "over"


class LentKv(NamedTuple):
    """KV that may be read while its gate is open."""

    key: CacheKey
    pages: IntArray
    resume_state: IntArray  # empty: it has none
    gate: PageGate


class Room:
    """The state of one room, and the clients that wait in it. Only the gate is used by several
    threads."""

    def __init__(self) -> None:
        self.state = RoomState.UNKNOWN
        self.lent = LentKv(CacheKey("", b""), NO_PAGES, NO_PAGES, PageGate())
        self.why = ""  # reason of its end
        self.num_askers = 0
        self.renewed_s = 0.0
        self.woken: set[asyncio.Event] = set()

    def wake(self) -> None:
        for event in self.woken:
            event.set()

    def end(self, why: str) -> None:
        self.state = RoomState.OVER
        self.why = why
        self.wake()


class Rooms:
    """A room whose last client has left is returned: its KV was taken, or no client needs it any
    more."""

    def __init__(self, news: News) -> None:
        self._news = news
        self.by_name: dict[str, Room] = {}
        self._over: OrderedDict[str, str] = OrderedDict()  # why each has ended

    def expect(self, name: str) -> None:
        self._enter(name, RoomState.EXPECTED)

    def lend(self, name: str, lent: LentKv) -> None:
        self._enter(name, RoomState.LENT, lent)

    def _enter(self, name: str, state: RoomState, lent: LentKv | None = None) -> None:
        self._over.pop(name, None)
        room = self.by_name.setdefault(name, Room())
        room.state = state
        if lent is not None:
            room.lent = lent
        room.wake()

    def end(self, name: str, why: str) -> None:
        room = self.by_name.pop(name, None)
        self._over[name] = why
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
        if room is not None:
            room.end(why)

    def end_visited(self, why: str) -> None:
        """End all rooms that have clients."""
        for name, room in list(self.by_name.items()):
            if not room.num_askers:
                continue
            if room.state is not RoomState.UNKNOWN:
                self._news.returned(name)
            room.end(why)
            del self.by_name[name]

    def join(self, name: str) -> Room:
        """A client enters the room of this name, or an ended room if it has ended."""
        why = self._over.get(name)
        if why is not None:
            room = Room()
            room.end(why)
        else:
            room = self.by_name.setdefault(name, Room())
        room.num_askers += 1
        return room

    def leave(self, name: str, room: Room) -> None:
        """A client leaves a room."""
        room.num_askers -= 1
        if room.num_askers:
            return
        if room.state is RoomState.UNKNOWN:
            if self.by_name.get(name) is room:
                del self.by_name[name]
        elif room.state is not RoomState.OVER:
            self._news.returned(name)
