"""The side of the server that lends KV: it listens, lets clients wait until their prompt is
computed, and sends pages of the pool.

    engine's thread   expect, lend, refuse, withdraw ─▶ rooms ─▶ clients that wait in a room wake up
    thread            a connection for each prompt that is asked for
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from weft.arrays import IntArray
from weft.handoff.facts import KvFacts
from weft.handoff.news import News
from weft.handoff.pages import HandoffMemory, PageGate
from weft.handoff.reception import Reception
from weft.handoff.rooms import LentKv, Rooms
from weft.handoff.thread import LoopThread
from weft.handoff.visit import LendTerms
from weft.memory.handoff.protocol import HandoffNews, HandoffReport, NoHandoff
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.observe.log import EventLog
from weft.tiers.pages import PoolPages

BEAT_S = 1.0  # interval of `Beat` messages
ROOM_S = 5.0  # time in which the request of a room must come after a client has asked for it
BACKLOG = 256

log = EventLog("handoff")


class PrefillSide(NoHandoff):
    """`notify` is called when there is news, on any thread. Serves the connections of `listener`.
    `resume_states`: the memory of resume states, if sequences have some."""

    def __init__(
        self,
        listener: socket.socket,
        pool: PoolPages,
        *,
        page_size: int,
        secret: str,
        lease_s: float,
        facts: KvFacts,
        notify: Callable[[], None],
        beat_s: float = BEAT_S,
        room_s: float = ROOM_S,
        resume_states: PoolPages | None = None,
    ) -> None:
        memory = HandoffMemory(pool=pool, resume_states=resume_states, page_size=page_size)
        terms = LendTerms(memory=memory, lease_s=lease_s, beat_s=beat_s, room_s=room_s)
        self._listener = listener
        self._facts = facts
        self._news = News(notify)
        self._gates: dict[str, PageGate] = {}  # of lent rooms
        # Used by the thread only.
        self._rooms = Rooms(self._news)
        self._reception = Reception(
            listener, terms, self._rooms, self._news, secret=secret, facts=facts
        )
        self._thread = LoopThread("weft-handoff")

    def start(self) -> None:
        self._listener.setblocking(False)
        self._facts.renew()
        self._thread.start()
        self._thread.soon(self._reception.begin)

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._thread.stop()
        self._listener.close()

    def expect(self, room: str) -> None:
        self._thread.soon(self._rooms.expect, room)

    def lend(
        self, room: str, key: CacheKey, pages: IntArray, resume_state: IntArray = NO_PAGES
    ) -> None:
        gate = PageGate()
        self._gates[room] = gate
        self._thread.soon(self._rooms.lend, room, LentKv(key, pages, resume_state, gate))

    def refuse(self, room: str, why: str) -> None:
        self._thread.soon(self._rooms.end, room, why)

    def withdraw(self, room: str, why: str) -> None:
        gate = self._gates.pop(room, None)
        if gate is not None:
            gate.shut()
        self._thread.soon(self._rooms.end, room, why)

    def renew(self, why: str) -> None:
        self._facts.renew()
        self._thread.soon(self._reception.send_away, f"{why} there")
        log.info("renewed", reason=why)

    def take(self) -> HandoffNews:
        return self._news.take()

    def report(self) -> HandoffReport:
        return self._news.report()
