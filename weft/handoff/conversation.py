"""The conversation with a server that lends KV, about one room: it asks, waits, and receives pages
straight into the pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from weft.handoff.delivery import Deliveries, Delivery, Orders
from weft.handoff.greeting import SentAway
from weft.handoff.news import News
from weft.handoff.pages import HandoffMemory
from weft.handoff.wire import (
    BadSpeech,
    Beat,
    Connection,
    Decline,
    PageGroup,
    Ready,
    Spoken,
    Wanted,
)
from weft.memory.handoff.protocol import FoundKv, RoomAddress
from weft.memory.prefix_cache import CacheKey


@dataclass(eq=False)
class Talk:
    """The conversation about one room. Used by the thread only."""

    pull: int
    address: RoomAddress
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


class TalkFollower:
    """Follows each talk from the question to its end. Used by the thread only."""

    def __init__(
        self,
        memory: HandoffMemory,
        deliveries: Deliveries,
        news: News,
        *,
        silence_s: float,
        beat_s: float,
    ) -> None:
        self._memory = memory
        self._deliveries = deliveries
        self._news = news
        self._silence_s = silence_s
        self._beat_s = beat_s

    async def follow(self, talk: Talk, connection: Connection) -> None:
        """Handle messages of the other server and orders of the engine, until the task is
        cancelled."""
        loop = asyncio.get_running_loop()
        incoming = connection.next_message()
        heard_s = loop.time()
        try:
            while True:
                await self._until_news(talk, incoming)
                delivery = talk.orders.take()
                if delivery is not None:
                    talk.delivery = delivery
                    with_resume_state = len(delivery.resume_state) > 0
                    await connection.send(Wanted(delivery.start, delivery.end, with_resume_state))
                    incoming = await self._receive(connection, incoming, delivery)
                    talk.delivery = None
                    self._deliveries.land(delivery)
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
        num_asked = talk.key.num_tokens
        is_part = talk.have < num_tokens <= num_asked and num_tokens % self._memory.page_size == 0
        if not is_part or talk.num_found:
            raise BadSpeech(f"{num_tokens:,} of {num_asked:,} tokens are said to be ready")
        talk.num_found = num_tokens
        self._news.found(FoundKv(talk.pull, num_tokens))

    async def _receive(
        self, connection: Connection, incoming: asyncio.Future[Spoken], delivery: Delivery
    ) -> asyncio.Future[Spoken]:
        """Receive the pages of a delivery, and its resume state. Returns the future of the next
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
        memory = self._memory.pool
        pages = delivery.pages[first : first + piece.num_pages].tolist()
        if piece.is_resume_state:
            if self._memory.resume_states is None:
                raise BadSpeech("a resume state was not asked for")
            memory = self._memory.resume_states
            pages = delivery.resume_state.tolist()
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
        if piece.is_resume_state:
            delivery.has_resume_state = True
        else:
            delivery.num_pages += piece.num_pages
        self._news.num_bytes += piece.num_bytes
