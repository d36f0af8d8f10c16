"""What the thread of a side has to tell the engine, under a lock, and numbers that only the thread
writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from weft.memory.handoff.protocol import NOTHING_NEW, FoundKv, HandoffNews, HandoffReport, Missed
from weft.memory.tiers.protocol import Landed

T = TypeVar("T")


class News:
    """`notify` is called when there is news, on the thread."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._has_news = False
        self._renewed: list[str] = []
        self._returned: list[str] = []
        self._found: list[FoundKv] = []
        self._landed: list[Landed] = []
        self._missed: list[Missed] = []
        self.num_bytes = 0
        self.num_connections = 0
        self.num_faults = 0

    def renewed(self, room: str) -> None:
        self._add(self._renewed, room)

    def returned(self, room: str) -> None:
        self._add(self._returned, room)

    def found(self, kv: FoundKv) -> None:
        self._add(self._found, kv)

    def landed(self, landed: Landed) -> None:
        self._add(self._landed, landed)

    def missed(self, missed: Missed) -> None:
        self.num_faults += 1
        self._add(self._missed, missed)

    def take(self) -> HandoffNews:
        """What has happened since the last call."""
        if not self._has_news:
            return NOTHING_NEW
        with self._lock:
            news = HandoffNews(
                renewed=tuple(self._renewed),
                returned=tuple(self._returned),
                found=tuple(self._found),
                landed=tuple(self._landed),
                missed=tuple(self._missed),
            )
            self._renewed.clear()
            self._returned.clear()
            self._found.clear()
            self._landed.clear()
            self._missed.clear()
            self._has_news = False
        return news

    def report(self) -> HandoffReport:
        return HandoffReport(self.num_bytes, self.num_connections, self.num_faults)

    def _add(self, to: list[T], one: T) -> None:
        with self._lock:
            to.append(one)
            self._has_news = True
        self._notify()
