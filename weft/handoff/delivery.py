"""Transfers of KV from another server, from the engine's order until the pages are the engine's
again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from weft.arrays import IntArray
from weft.handoff.news import News
from weft.handoff.pages import PageGate
from weft.memory.tiers.protocol import Landed


@dataclass(eq=False)
class Delivery:
    """A transfer, as an order for the thread."""

    ticket: int
    start: int  # tokens
    end: int
    pages: IntArray
    resume_state: IntArray  # empty: no resume state is transferred
    asked_s: float
    gate: PageGate = field(default_factory=PageGate)
    num_pages: int = 0  # pages that have been received completely
    has_resume_state: bool = False  # the resume state has been received

    @property
    def is_complete(self) -> bool:
        has_all = self.has_resume_state or not len(self.resume_state)
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


class Deliveries:
    """All deliveries that have not ended. A lock protects them, because the engine cancels some."""

    def __init__(self, page_size: int, news: News) -> None:
        self._page_size = page_size
        self._news = news
        self._lock = threading.Lock()
        self._by_ticket: dict[int, Delivery] = {}

    def add(self, delivery: Delivery) -> None:
        with self._lock:
            self._by_ticket[delivery.ticket] = delivery

    def cancel(self, ticket: int) -> Delivery | None:
        """Let no more be written to the pages of a delivery. None if it has ended already."""
        with self._lock:
            delivery = self._by_ticket.get(ticket)
        if delivery is not None:
            delivery.gate.shut()
        return delivery

    def land(self, delivery: Delivery) -> None:
        """End a delivery: its pages are the engine's again."""
        delivery.gate.shut()
        num_tokens = delivery.num_pages * self._page_size
        seconds = time.monotonic() - delivery.asked_s
        with self._lock:
            self._by_ticket.pop(delivery.ticket, None)
        self._news.landed(
            Landed(delivery.ticket, num_tokens, seconds, has_resume_state=delivery.has_resume_state)
        )
