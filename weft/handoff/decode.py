"""The side of the server that takes KV: it asks for prompts that another server computes, and
receives their pages straight into its own pool.

    engine's thread   ask, fetch, cancel, leave ─▶ orders ─┐
    thread            a connection for each prompt ◀───────┘

If a connection breaks, is silent for a while, or sends invalid data, one prompt is computed here.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.arrays import IntArray
from weft.config.handoff import is_loopback
from weft.handoff.facts import Facts, KvFacts
from weft.handoff.gate import GateShut, PageGate
from weft.handoff.greeting import Meeting, Refusals, SentAway, greet
from weft.handoff.thread import LoopThread
from weft.handoff.wire import (
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
from weft.memory.handoff.protocol import (
    NOTHING_NEW,
    FoundKv,
    HandoffNews,
    HandoffReport,
    MeetingPlace,
    Missed,
    NoHandoff,
)
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import Landed
from weft.observe.log import EventLog
from weft.tiers.disk import PoolPages

SILENCE_S = 5.0  # after this time, a silent server counts as dead
BEAT_S = 1.0  # interval of `Beat` messages
CONNECT_S = 3.0

log = EventLog("handoff")


class Unreachable(Exception):
    """No connection can be opened. The message says why."""


# What may become of a conversation that nobody waits for.
NO_ANSWER = (OSError, EOFError, TimeoutError, BadSpeech, DamagedPiece, SentAway, Unreachable)


@dataclass(eq=False)
class Delivery:
    """A transfer, as an order for the thread."""

    ticket: int
    start: int  # tokens
    end: int
    pages: IntArray
    ending: IntArray  # empty: no ending is transferred
    asked_s: float
    gate: PageGate = field(default_factory=PageGate)
    num_pages: int = 0  # pages that have been received completely
    has_ending: bool = False  # the ending has been received

    @property
    def is_complete(self) -> bool:
        has_all = self.has_ending or not len(self.ending)
        return has_all and self.num_pages == len(self.pages)


class Orders:
    """The ordered deliveries of a conversation that it has not begun. Used by the thread only.

    A delivery stays here until the conversation takes it. The task that waits for one never holds
    it, so that no delivery is lost if that task is cancelled.
    """

    def __init__(self) -> None:
        self._deliveries: deque[Delivery] = deque()
        self._come = asyncio.Event()

    def add(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._come.set()

    def take(self) -> Delivery | None:
        """The oldest delivery, which belongs to the caller now; None if there is none."""
        if not self._deliveries:
            return None
        oldest = self._deliveries.popleft()
        if not self._deliveries:
            self._come.clear()
        return oldest

    async def wait(self) -> None:
        """Wait until there is a delivery."""
        await self._come.wait()


@dataclass(eq=False)
class Talk:
    """The conversation about one room. Used by the thread only."""

    pull: int
    place: MeetingPlace
    key: CacheKey
    have: int
    orders: Orders = field(default_factory=Orders)
    task: asyncio.Task[None] | None = None
    delivery: Delivery | None = None  # the delivery in progress
    has_begun: bool = False
    has_asked: bool = False  # the other side knows that the room is wanted
    num_found: int = 0  # tokens that the other side has; 0: it has not said so yet
    is_left: bool = False  # nothing more is needed
    refusal: str = ""  # why this server ended it


class DecodeSide(NoHandoff):
    """`notify` is called when there is news, on any thread. `endings`: the memory of endings, if
    sequences have some."""

    def __init__(
        self,
        pool: PoolPages,
        *,
        page_size: int,
        secret: str,
        facts: KvFacts,
        notify: Callable[[], None],
        silence_s: float = SILENCE_S,
        beat_s: float = BEAT_S,
        endings: PoolPages | None = None,
    ) -> None:
        self._pool = pool
        self._endings = endings
        self._page_size = page_size
        self._secret = secret
        self._facts = facts
        self._notify = notify
        self._silence_s = silence_s
        self._beat_s = beat_s
        self._pull_of: dict[int, int] = {}  # by ticket; used by the engine's thread only
        # Protects data that threads write and the engine reads.
        self._lock = threading.Lock()
        self._found: list[FoundKv] = []
        self._landed: list[Landed] = []
        self._missed: list[Missed] = []
        self._deliveries: dict[int, Delivery] = {}  # by ticket
        self._num_bytes = 0
        self._faults = 0
        self._talks: dict[int, Talk] = {}  # used by the thread only
        self._refusals = Refusals()
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("weft-handoff")

    def start(self) -> None:
        self._facts.renew()
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._thread.stop()

    # Called by the engine

    def ask(self, pull: int, place: MeetingPlace, key: CacheKey, have: int) -> None:
        self._thread.soon(self._begin, Talk(pull, place, key, have))

    def bind(self, ticket: int, pull: int) -> None:
        self._pull_of[ticket] = pull

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        ending: IntArray = NO_PAGES,
    ) -> None:
        end = len(key.tokens) // TOKEN_BYTES
        delivery = Delivery(ticket, start, end, pages, ending, time.monotonic())
        with self._lock:
            self._deliveries[ticket] = delivery
        self._thread.soon(self._order, self._pull_of.pop(ticket), delivery)

    def cancel(self, ticket: int) -> None:
        with self._lock:
            delivery = self._deliveries.get(ticket)
        if delivery is not None:
            delivery.gate.shut()
            self._thread.soon(self._break_off, delivery)

    def leave(self, pull: int) -> None:
        self._thread.soon(self._leave, pull)

    def dismiss(self, place: MeetingPlace) -> None:
        self._thread.soon(self._say_goodbye, place)

    def renew(self, why: str) -> None:
        self._facts.renew()
        self._thread.soon(self._leave_all, f"{why} here")
        log.info("renewed", reason=why)

    def take(self) -> HandoffNews:
        if not self._found and not self._landed and not self._missed:
            return NOTHING_NEW
        with self._lock:
            news = HandoffNews(
                found=tuple(self._found),
                landed=tuple(self._landed),
                missed=tuple(self._missed),
            )
            self._found.clear()
            self._landed.clear()
            self._missed.clear()
        return news

    def report(self) -> HandoffReport:
        return HandoffReport(self._num_bytes, self._faults)

    # Orders, on the thread

    def _begin(self, talk: Talk) -> None:
        self._talks[talk.pull] = talk
        talk.task = self._thread.loop.create_task(self._run(talk))

    def _order(self, pull: int, delivery: Delivery) -> None:
        talk = self._talks.get(pull)
        if talk is not None:
            talk.orders.add(delivery)
        else:
            self._land(delivery)  # the connection has ended in the meantime

    def _leave(self, pull: int) -> None:
        """End a conversation at once, also while the other side is silent."""
        talk = self._talks.get(pull)
        if talk is None:
            return
        talk.is_left = True
        if not talk.has_asked:  # otherwise the other side sees that the connection ends
            self._say_goodbye(talk.place)
        # A task that has not begun would end without a report.
        if talk.has_begun and talk.task is not None:
            talk.task.cancel()

    def _break_off(self, delivery: Delivery) -> None:
        for talk in self._talks.values():
            if talk.delivery is delivery and talk.task is not None:
                talk.task.cancel()

    def _leave_all(self, why: str) -> None:
        """End all conversations, because the weights have changed."""
        self._refusals.forget()
        for talk in self._talks.values():
            talk.refusal = why
            # A task that has not begun would end without a report.
            if talk.has_begun and talk.task is not None:
                talk.task.cancel()

    def _say_goodbye(self, place: MeetingPlace) -> None:
        task = self._thread.loop.create_task(self._dismiss(place))
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    # Talks, on the thread

    async def _run(self, talk: Talk) -> None:
        reason = "lost"
        why = "it was given up"
        talk.has_begun = True
        try:
            if not talk.refusal and not talk.is_left:
                await self._talk(talk)
            reason = ""
        except SentAway as exc:
            reason = "refused"
            why = f"{talk.place}: {exc}"
            self._refusals.tell(f"{talk.place}", f"{exc}")
        except DamagedPiece as exc:
            reason = "damaged"
            why = f"{talk.place}: {exc}"
        except Unreachable as exc:
            reason = "unreachable"
            why = f"{talk.place}: {exc}"
        except TimeoutError:
            why = f"{talk.place} has sent nothing for {self._silence_s:g} s"
        except (OSError, EOFError, BadSpeech) as exc:
            why = f"{talk.place}: {exc}"
        except (GateShut, asyncio.CancelledError):
            pass
        except Exception as exc:  # after any error the request computes its prompt
            log.exception("talk_failed", exc)
            why = f"{type(exc).__name__}: {exc}"
        if talk.refusal:
            reason = "refused"
            why = talk.refusal
        if talk.is_left:
            reason = ""
        del self._talks[talk.pull]
        while (delivery := talk.orders.take()) is not None:
            self._land(delivery)
        if talk.delivery is not None:
            self._land(talk.delivery)
        if reason:
            with self._lock:
                self._faults += 1
                self._missed.append(Missed(talk.pull, reason, why))
        self._notify()

    async def _talk(self, talk: Talk) -> None:
        connection = await self._greeted(talk.place)
        try:
            await connection.send(Ask(talk.key.namespace, talk.key.tokens, talk.have))
            talk.has_asked = True
            await self._follow(talk, connection)
        finally:
            connection.close()

    async def _follow(self, talk: Talk, connection: Connection) -> None:
        """Handle messages of the other server and orders of the engine, until the task is
        cancelled."""
        loop = self._thread.loop
        incoming = connection.next_message()
        heard_s = loop.time()
        try:
            while True:
                await self._until_news(talk, incoming)
                delivery = talk.orders.take()
                if delivery is not None:
                    talk.delivery = delivery
                    with_ending = len(delivery.ending) > 0
                    await connection.send(Wanted(delivery.start, delivery.end, with_ending))
                    incoming = await self._receive(connection, incoming, delivery)
                    talk.delivery = None
                    self._land(delivery)
                    heard_s = loop.time()
                elif incoming.done():
                    self._hear(talk, incoming.result())
                    heard_s = loop.time()
                    incoming = connection.next_message()
                else:
                    await connection.send(Beat())
                if loop.time() >= heard_s + self._silence_s:
                    raise TimeoutError
        finally:
            incoming.cancel()

    async def _until_news(self, talk: Talk, incoming: asyncio.Future[Spoken]) -> None:
        """Wait for an order or a message, at most for one beat."""
        ordered = asyncio.ensure_future(talk.orders.wait())
        either: set[asyncio.Future[Any]] = {incoming, ordered}
        try:
            await asyncio.wait(
                either,
                timeout=self._beat_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            ordered.cancel()

    def _hear(self, talk: Talk, message: Spoken) -> None:
        match message:
            case Beat():
                pass
            case Ready(num_tokens):
                self._find(talk, num_tokens)
            case Decline():
                raise SentAway(message.why)
            case _:
                raise BadSpeech(f"{type(message).__name__} was not asked for")

    def _find(self, talk: Talk, num_tokens: int) -> None:
        num_asked = len(talk.key.tokens) // TOKEN_BYTES
        is_part = talk.have < num_tokens <= num_asked and num_tokens % self._page_size == 0
        if not is_part or talk.num_found:
            raise BadSpeech(f"{num_tokens:,} of {num_asked:,} tokens are said to be ready")
        talk.num_found = num_tokens
        with self._lock:
            self._found.append(FoundKv(talk.pull, num_tokens))
        self._notify()

    async def _receive(
        self, connection: Connection, incoming: asyncio.Future[Spoken], delivery: Delivery
    ) -> asyncio.Future[Spoken]:
        """Receive the pages of a delivery, and its ending. Returns the future of the next
        message."""
        while not delivery.is_complete:
            async with asyncio.timeout(self._silence_s):
                group = await self._next_group(connection, incoming)
            async with asyncio.timeout(self._silence_s):
                await self._receive_group(connection, group, delivery)
            incoming = connection.next_message()
        return incoming

    @staticmethod
    async def _next_group(connection: Connection, incoming: asyncio.Future[Spoken]) -> PageGroup:
        """The next group of pages. Beats before it do not count: pages are due."""
        message = await incoming
        while isinstance(message, Beat):
            message = await connection.receive()
        if isinstance(message, Decline):
            raise SentAway(message.why)
        if not isinstance(message, PageGroup):
            raise BadSpeech(f"{type(message).__name__} instead of PageGroup")
        return message

    async def _receive_group(
        self, connection: Connection, piece: PageGroup, delivery: Delivery
    ) -> None:
        first = delivery.num_pages
        memory = self._pool
        pages = delivery.pages[first : first + piece.num_pages].tolist()
        if piece.is_ending:
            if self._endings is None:
                raise BadSpeech("an ending was not asked for")
            memory = self._endings
            pages = delivery.ending.tolist()
        if (
            not pages
            or len(pages) != piece.num_pages
            or piece.num_bytes != len(pages) * memory.page_bytes
        ):
            raise BadSpeech(f"{piece.num_pages:,} pages with {piece.num_bytes:,} bytes")
        pieces: list[memoryview] = []
        for page in pages:
            pieces += memory.pieces(page)
        await connection.receive_pages(pieces, delivery.gate)
        if piece.is_ending:
            delivery.has_ending = True
        else:
            delivery.num_pages += piece.num_pages
        self._num_bytes += piece.num_bytes

    async def _dismiss(self, place: MeetingPlace) -> None:
        """Tell the other server that a room is not needed. If that fails, its lease expires."""
        with suppress(*NO_ANSWER):
            connection = await self._greeted(place)
            try:
                await connection.send(Ask("", b"", 0, is_needless=True))
                async with asyncio.timeout(2 * self._silence_s):
                    while isinstance(await connection.receive(), Beat):
                        pass
            finally:
                connection.close()

    def _known_facts(self) -> Facts:
        """Raises SentAway while the facts are not known."""
        facts = self._facts.now
        if isinstance(facts, str):
            raise SentAway(f"{facts} here")
        return facts

    async def _greeted(self, place: MeetingPlace) -> Connection:
        """A connection on which both sides have greeted. Raises SentAway if either side refuses,
        and Unreachable."""
        facts = self._known_facts()
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await self._connected(place)
        except TimeoutError as exc:
            raise Unreachable(f"no connection in {CONNECT_S:g} s") from exc
        except OSError as exc:
            raise Unreachable(exc.strerror or f"{exc}") from exc
        except UnicodeError as exc:  # of a look-up
            raise Unreachable("the host is no name of a machine") from exc
        connection = Connection(sock)
        try:
            meeting = Meeting(f"{place}", place.room)
            await greet(connection, self._secret, facts, meeting, self._silence_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _connected(self, place: MeetingPlace) -> socket.socket:
        loop = self._thread.loop
        found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        if not self._secret and not is_loopback(str(address[0])):
            raise SentAway("it is another machine, and there is no --handoff-secret")
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _land(self, delivery: Delivery) -> None:
        """End a delivery: its pages are the engine's again."""
        delivery.gate.shut()
        num_tokens = delivery.num_pages * self._page_size
        seconds = time.monotonic() - delivery.asked_s
        with self._lock:
            self._deliveries.pop(delivery.ticket, None)
            self._landed.append(
                Landed(delivery.ticket, num_tokens, seconds, has_ending=delivery.has_ending)
            )
        self._notify()
