"""Pins between the engine's steps: their expiry, their removal when memory is needed, and their
return.

    a step               ─▶ pin computed beginnings; remove expired pins
    no request can run   ─▶ a firm pin becomes soft, one by one, until a request can run
    no request is open   ─▶ soft pins become firm again; lost KV is read from the store

Requests without pins do not use this service.
"""

from __future__ import annotations

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.tiers.service import TierService
from weft.engine.tool_pauses import ToolPauses
from weft.messages.cache import GetCacheReply
from weft.messages.pins import PinStatus
from weft.messages.replies import StepOutput
from weft.observe.log import EventLog
from weft.scheduler.features.pins import PinsFeature
from weft.scheduler.history import EventKind, Stop

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

log = EventLog("cache")


class PinService(Service):
    """Attached while there are pins, or requests that pin or ask about the caches."""

    name = "pins"

    def __init__(
        self,
        core: EngineCore,
        feature: PinsFeature,
        tiers: TierService | None,
        pauses: ToolPauses,
    ) -> None:
        self._core = core
        self.pauses = pauses  # pins of chats that wait for results of tools
        self.feature = feature
        self._tiers = tiers
        # Time of the next attempt to read lost KV from the store, and the interval after that.
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S
        feature.wake = self.wake
        feature.note = self.note

    def wake(self) -> None:
        self._core.hooks.attach(self)

    def note(
        self,
        id: int,
        detail: str,
        now: float,
    ) -> None:
        self._core.note(id, EventKind.PINNED, detail, now)

    def wake_at(self) -> float:
        book = self.feature.book
        if self._tiers is None or all(entry.is_there for entry in book.by_name.values()):
            return book.due_s
        return min(book.due_s, self._retry_at_s)

    # Moments

    def before_step(self, now: float) -> None:
        if self._core.loop.num_stuck and self._lacks_memory():
            self._give_way()

    def after_step(self, now: float) -> None:
        feature = self.feature
        book = feature.book
        if feature.pending:
            feature.pin_what_is_computed(self._core.scheduler.kv, now)
        for name in book.expire(now):
            log.info("pin_expired", name=name)
        if len(book) and not self._core.scheduler.requests:
            self._restore(now)
        self._store()
        if not self._is_needed:
            self._core.hooks.detach(self)

    def filter_output(self, output: StepOutput) -> StepOutput | None:
        """Add the use of the caches by requests that end in this output."""
        ended = self.feature.ended
        if not ended:
            return output
        pieces = []
        for finish in output.finished:
            piece = ended.pop(finish.id, None)
            if piece is not None:
                pieces.append(piece)
        return msgspec.structs.replace(output, aux=[*output.aux, *pieces])

    # Calls

    def unpin(self, name: str) -> int:
        """Remove a pin. Returns its tokens; 0 if there is no pin of this name."""
        return self.feature.book.remove(name)

    def add_to(
        self,
        reply: GetCacheReply,
        now: float,
    ) -> GetCacheReply:
        """The reply with the pins."""
        kv = self._core.scheduler.kv
        book = self.feature.book
        return msgspec.structs.replace(
            reply,
            pinned_tokens=book.num_pages(kv) * kv.page_size,
            max_pinned_tokens=book.max_pages * kv.page_size,
            pins=self.statuses(now),
        )

    def statuses(
        self,
        now: float,
        most: int | None = None,
    ) -> list[PinStatus]:
        """The pins, least recently used first; `most`: only the last of them."""
        kv = self._core.scheduler.kv
        book = self.feature.book
        entries = list(book.by_name.values())
        if most is not None:
            entries = entries[-most:]
        return [
            PinStatus(
                name=entry.name,
                tenant=entry.tenant,
                tokens=entry.pin.num_tokens,
                state=book.state_of(entry, kv),
                ttl_s=entry.ttl_s,
                expires_in_s=entry.until_s - now,
                uses=entry.num_uses,
            )
            for entry in entries
        ]

    # Inside
    @property
    def _is_needed(self) -> bool:
        feature = self.feature
        return bool(len(feature.book) or feature.has_users or feature.ended)

    def _lacks_memory(self) -> bool:
        """Whether no request can run for lack of memory."""
        scheduler = self._core.scheduler
        if scheduler.prefills.open_prompts():
            return True
        if len(scheduler.requests) > len(scheduler.waiting_queue):
            return False
        last = scheduler.history.last_pass
        if last is None or last.last_walk != scheduler.history.num_walks:
            return False
        return last.stop is Stop.NO_TOKEN

    def _give_way(self) -> None:
        scheduler = self._core.scheduler
        if scheduler.kv.pins.give_way():
            scheduler.memory_came_back()
            log.warning("pin_gives_way", reason="a request could not run otherwise")

    def _store(self) -> None:
        """Let new pins be written, if there is a store."""
        for key in self.feature.book.take_fresh():
            if self._tiers is not None:
                self._tiers.store(key)

    def _restore(self, now: float) -> None:
        """No request is open: make soft and lost pins firm again."""
        block_len = 1
        if self._tiers is not None:
            block_len = self._tiers.block_len
        missing = self.feature.book.restore(self._core.scheduler.kv, block_len)
        if self._tiers is None:
            return
        if not missing:
            self._retry_s = FIRST_RETRY_S
            return
        for entry in missing:
            self._tiers.bring(entry.key, now)
        self._retry_at_s = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
