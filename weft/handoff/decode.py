"""The side of the server that takes KV: it asks for prompts that another server computes, and
receives their pages straight into its own pool.

    engine's thread   ask, fetch, cancel, leave ─▶ orders ─┐
    thread            a connection for each prompt ◀───────┘

If a connection breaks, is silent for a while, or sends invalid data, one prompt is computed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.arrays import IntArray
from weft.handoff.connect import Connector
from weft.handoff.conversation import Talk, TalkFollower
from weft.handoff.delivery import Deliveries, Delivery
from weft.handoff.facts import KvFacts
from weft.handoff.news import News
from weft.handoff.pages import HandoffMemory
from weft.handoff.talks import Talks
from weft.handoff.thread import LoopThread
from weft.memory.handoff.protocol import HandoffNews, HandoffReport, NoHandoff, RoomAddress
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.observe.log import EventLog
from weft.tiers.pages import PoolPages

SILENCE_S = 5.0  # after this time, a silent server counts as dead
BEAT_S = 1.0  # interval of `Beat` messages

log = EventLog("handoff")


class DecodeSide(NoHandoff):
    """`notify` is called when there is news, on any thread. `resume_states`: the memory of resume
    states, if sequences have some."""

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
        resume_states: PoolPages | None = None,
    ) -> None:
        self._facts = facts
        self._news = News(notify)
        self._pull_of: dict[int, int] = {}  # by ticket
        self._deliveries = Deliveries(page_size, self._news)
        memory = HandoffMemory(pool=pool, resume_states=resume_states, page_size=page_size)
        follower = TalkFollower(
            memory, self._deliveries, self._news, silence_s=silence_s, beat_s=beat_s
        )
        connector = Connector(secret, facts, silence_s)
        # Used by the thread only.
        self._talks = Talks(connector, follower, self._deliveries, self._news, silence_s)
        self._thread = LoopThread("weft-handoff")

    def start(self) -> None:
        self._facts.renew()
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._thread.stop()

    def ask(self, pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        self._thread.soon(self._talks.begin, Talk(pull, address, key, have))

    def bind(self, ticket: int, pull: int) -> None:
        self._pull_of[ticket] = pull

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        end = key.num_tokens
        delivery = Delivery(ticket, start, end, pages, resume_state, time.monotonic())
        self._deliveries.add(delivery)
        self._thread.soon(self._talks.order, self._pull_of.pop(ticket), delivery)

    def cancel(self, ticket: int) -> None:
        delivery = self._deliveries.cancel(ticket)
        if delivery is not None:
            self._thread.soon(self._talks.break_off, delivery)

    def leave(self, pull: int) -> None:
        self._thread.soon(self._talks.leave, pull)

    def dismiss(self, address: RoomAddress) -> None:
        self._thread.soon(self._talks.say_goodbye, address)

    def renew(self, why: str) -> None:
        self._facts.renew()
        self._thread.soon(self._talks.leave_all, f"{why} here")
        log.info("renewed", reason=why)

    def take(self) -> HandoffNews:
        return self._news.take()

    def report(self) -> HandoffReport:
        return self._news.report()
