"""The side of the server that lends KV: it listens, lets clients wait until their prompt is
computed, and sends pages of the pool.

    engine's thread   expect, lend, refuse, withdraw ─▶ rooms ─▶ clients that wait in a room wake up
    thread            a connection for each prompt that is asked for

A room whose last connection has ended is returned: its KV was taken, or no client needs it any
more.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.handoff.facts import KvFacts
from weft.handoff.gate import GateShut, PageGate
from weft.handoff.greeting import Refusals, SentAway, welcome
from weft.handoff.thread import LoopThread
from weft.handoff.wire import (
    GROUP_BYTES,
    Ask,
    BadSpeech,
    Beat,
    Connection,
    DamagedPiece,
    Decline,
    PageGroup,
    Ready,
    Spoken,
    Wanted,
)
from weft.memory.handoff.protocol import NOTHING_NEW, HandoffNews, HandoffReport, NoHandoff
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.observe.log import EventLog
from weft.tiers.disk import PoolPages

BEAT_S = 1.0  # interval of `Beat` messages
ROOM_S = 5.0  # time in which the request of a room must come after a client has asked for it
SEND_S = 10.0  # time in which a group of pages must be received
BACKLOG = 256
MAX_REMEMBERED = 4_096  # ended rooms
MAX_STRANGERS = 256  # connections that have not greeted, each for a few seconds at most

log = EventLog("handoff")


class RoomState(Enum):
    UNKNOWN = "unknown"  # no request has named it yet
    EXPECTED = "expected"
    LENT = "lent"
    OVER = "over"


class LentKv(NamedTuple):
    """KV that may be read while its gate is open."""

    key: CacheKey
    pages: IntArray
    ending: IntArray  # empty: it has none
    gate: PageGate


class Room:
    """The state of one room, and the clients that wait in it. Only `gate` is used by several
    threads."""

    def __init__(self) -> None:
        self.state = RoomState.UNKNOWN
        self.key = CacheKey("", b"")
        self.pages: IntArray = NO_PAGES
        self.ending: IntArray = NO_PAGES
        self.why = ""  # reason of its end
        self.gate = PageGate()
        self.num_askers = 0
        self.renewed_s = 0.0
        self.woken: set[asyncio.Event] = set()

    def wake(self) -> None:
        for event in self.woken:
            event.set()


class PrefillSide(NoHandoff):
    """`notify` is called when there is news, on any thread. Serves the connections of `listener`.
    `endings`: the memory of endings, if sequences have some."""

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
        endings: PoolPages | None = None,
    ) -> None:
        self._listener = listener
        self._pool = pool
        self._endings = endings
        self._page_size = page_size
        self._secret = secret
        self._lease_s = lease_s
        self._facts = facts
        self._notify = notify
        self._beat_s = beat_s
        self._room_s = room_s
        # Protects data that threads write and the engine reads.
        self._lock = threading.Lock()
        self._renewed: list[str] = []
        self._returned: list[str] = []
        self._gates: dict[str, PageGate] = {}  # of lent rooms
        self._num_bytes = 0
        self._faults = 0
        # Used by the thread only.
        self._rooms: dict[str, Room] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        self._refusals = Refusals()
        self._num_renewed = 0
        self._num_strangers = 0  # connections that have not greeted
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("weft-handoff")

    def start(self) -> None:
        self._listener.setblocking(False)
        self._facts.renew()
        self._thread.start()
        self._thread.soon(self._begin)

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._thread.stop()
        self._listener.close()

    # Called by the engine

    def expect(self, room: str) -> None:
        self._thread.soon(self._enter, room, RoomState.EXPECTED)

    def lend(self, room: str, key: CacheKey, pages: IntArray, ending: IntArray = NO_PAGES) -> None:
        gate = PageGate()
        with self._lock:
            self._gates[room] = gate
        self._thread.soon(self._enter, room, RoomState.LENT, LentKv(key, pages, ending, gate))

    def refuse(self, room: str, why: str) -> None:
        self._thread.soon(self._end, room, why)

    def withdraw(self, room: str, why: str) -> None:
        with self._lock:
            gate = self._gates.pop(room, None)
        if gate is not None:
            gate.shut()
        self._thread.soon(self._end, room, why)

    def renew(self, why: str) -> None:
        self._facts.renew()
        self._thread.soon(self._send_away, f"{why} there")
        log.info("renewed", reason=why)

    def take(self) -> HandoffNews:
        if not self._renewed and not self._returned:
            return NOTHING_NEW
        with self._lock:
            news = HandoffNews(renewed=tuple(self._renewed), returned=tuple(self._returned))
            self._renewed.clear()
            self._returned.clear()
        return news

    def report(self) -> HandoffReport:
        return HandoffReport(self._num_bytes, self._faults)

    # Rooms, on the thread

    def _enter(
        self,
        name: str,
        state: RoomState,
        lent: LentKv | None = None,
    ) -> None:
        self._over.pop(name, None)
        room = self._rooms.setdefault(name, Room())
        room.state = state
        if lent is not None:
            room.key, room.pages, room.ending, room.gate = lent
        room.wake()

    def _end(self, name: str, why: str) -> None:
        room = self._rooms.pop(name, None)
        self._over[name] = why
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
        if room is not None:
            room.state = RoomState.OVER
            room.why = why
            room.wake()

    def _send_away(self, why: str) -> None:
        """End all conversations: clients must greet again."""
        self._num_renewed += 1
        self._refusals.forget()
        for name, room in list(self._rooms.items()):
            if not room.num_askers:
                continue
            if room.state is not RoomState.UNKNOWN:
                self._tell(returned=name)
            room.state = RoomState.OVER
            room.why = why
            room.wake()
            del self._rooms[name]

    def _room_of(self, name: str) -> Room:
        """The room of this name, or an ended room if it has ended."""
        why = self._over.get(name)
        if why is not None:
            room = Room()
            room.state = RoomState.OVER
            room.why = why
            return room
        return self._rooms.setdefault(name, Room())

    # Connections, on the thread

    def _begin(self) -> None:
        self._spawn(self._accept_all())

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = self._thread.loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self) -> None:
        loop = self._thread.loop
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as exc:  # too many open files: open connections continue
                log.seldom("not_accepted", error=f"{exc}")
                await asyncio.sleep(self._beat_s)
                continue
            if self._num_strangers >= MAX_STRANGERS:
                log.seldom("too_many", peer=address[0], connections=self._num_strangers)
                sock.close()
                continue
            self._spawn(self._serve(sock, f"{address[0]}"))

    async def _welcomed(self, connection: Connection) -> str:
        """The room that the other side asks for, after both sides have greeted."""
        self._num_strangers += 1
        try:
            return await welcome(connection, self._secret, self._facts.now)
        finally:
            self._num_strangers -= 1

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(sock)
        try:
            num_renewed = self._num_renewed
            room = await self._welcomed(connection)
            ask = await connection.expect(Ask, self._lease_s)
            if num_renewed != self._num_renewed:
                await connection.send(Decline("the weights were changed there"))
                return
            await self._answer(connection, room, ask)
        except SentAway as exc:
            self._faults += 1
            self._refusals.tell(peer, f"{exc}")
        except (OSError, EOFError, TimeoutError, BadSpeech, DamagedPiece) as exc:
            self._faults += 1
            log.seldom("broken_off", peer=peer, error=f"{exc or type(exc).__name__}")
        except GateShut:
            pass  # the lease has ended; the other side sees the connection close
        except Exception as exc:  # ours; other connections continue
            self._faults += 1
            log.exception("visit_failed", exc, peer=peer)
        finally:
            connection.close()

    async def _answer(self, connection: Connection, name: str, ask: Ask) -> None:
        room = self._room_of(name)
        room.num_askers += 1
        visit = _Visit(self, connection, ask, name, room)
        try:
            with suppress(EOFError):  # nothing more is needed
                await visit.run()
        finally:
            visit.end()
            room.num_askers -= 1
            if not room.num_askers:
                self._left(name, room)

    def _left(self, name: str, room: Room) -> None:
        """The last client has left a room."""
        if room.state is RoomState.UNKNOWN:
            if self._rooms.get(name) is room:
                del self._rooms[name]
        elif room.state is not RoomState.OVER:
            self._tell(returned=name)

    def _tell(self, *, renewed: str = "", returned: str = "") -> None:
        with self._lock:
            if renewed:
                self._renewed.append(renewed)
            if returned:
                self._returned.append(returned)
        self._notify()


class _Visit:
    """One connection and its room."""

    def __init__(
        self,
        side: PrefillSide,
        connection: Connection,
        ask: Ask,
        name: str,
        room: Room,
    ) -> None:
        self._side = side
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
        self._known = shared_tokens(room.key, self._ask, self._side._page_size)
        if self._known <= self._ask.have:
            num_tokens = len(self._ask.tokens) // TOKEN_BYTES
            why = f"{self._known:,} of the {num_tokens:,} tokens are those of the room"
            await self._connection.send(Decline(why))
            return
        num_lent = len(room.key.tokens) // TOKEN_BYTES
        if len(room.ending) and self._known < num_lent:
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
        until_s = loop.time() + self._side._room_s
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
                timeout=self._side._beat_s,
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
        if room.state is RoomState.LENT and now >= room.renewed_s + self._side._lease_s / 4:
            room.renewed_s = now
            self._side._tell(renewed=self._name)

    async def _send(self, wanted: Wanted) -> None:
        """Send pages in groups, and the ending. Raises GateShut when the lease ends."""
        side = self._side
        size = side._page_size
        if wanted.start % size or not 0 <= wanted.start <= wanted.end <= self._known:
            raise BadSpeech(f"the tokens {wanted.start:,} to {wanted.end:,} are wanted")
        room = self._room
        pages = room.pages[wanted.start // size : -(-wanted.end // size)].tolist()
        # Without bytes, all layers have windows.
        at_once = max(GROUP_BYTES // max(side._pool.page_bytes, 1), 1)
        for first in range(0, len(pages), at_once):
            await self._send_group(side._pool, pages[first : first + at_once])
        if wanted.with_ending:
            if side._endings is None:
                raise BadSpeech("an ending is wanted, and there is none")
            await self._send_group(side._endings, room.ending.tolist(), is_ending=True)

    async def _send_group(
        self, memory: PoolPages, pages: list[int], *, is_ending: bool = False
    ) -> None:
        pieces: list[memoryview] = []
        for page in pages:
            pieces += memory.pieces(page)
        num_bytes = sum(map(len, pieces))
        async with asyncio.timeout(SEND_S):
            await self._connection.send(PageGroup(len(pages), num_bytes, is_ending))
            await self._connection.send_pages(pieces, self._room.gate)
        self._side._num_bytes += num_bytes
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
