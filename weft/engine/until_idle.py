"""Services that wait until the engine is idle, or until a deadline: flushes of the cache, and the
shutdown."""

from __future__ import annotations

import math

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.tiers.service import TierService
from weft.messages.control import FlushCacheReply
from weft.messages.requests import Abort


class CacheFlushes(Service):
    """Empties the prefix cache when no request uses it. Attached while calls wait for that."""

    name = "the flush of the cache"

    def __init__(self, core: EngineCore, tiers: TierService | None) -> None:
        self._core = core
        self._tiers = tiers
        self._waiting: list[tuple[float, int]] = []  # deadline and call

    def wake_at(self) -> float:
        return min((deadline for deadline, _ in self._waiting), default=math.inf)

    def ask(self, call: int, deadline: float) -> None:
        """Flush after the next step if the engine is idle then, or else when it is idle."""
        self._waiting.append((deadline, call))
        self._core.hooks.begin_work(self)

    def after_step(self, now: float) -> None:
        # One after the other: if a flush raises, later calls keep waiting, and no call is answered
        # twice.
        for entry in tuple(self._waiting):
            reply = self._reply(*entry)
            if reply is not None:
                self._waiting.remove(entry)
                self._core.send(reply)
        if not self._waiting:
            self._core.hooks.detach(self)

    def _reply(self, deadline: float, call: int) -> FlushCacheReply | None:
        """The answer to a call, if it can be given now: done, or out of time."""
        scheduler = self._core.scheduler
        if scheduler.flush_cache():
            left = "" if self._tiers is None else self._tiers.left_by_flush()
            return FlushCacheReply(call=call, success=True, message=left)
        if self._core.clock() < deadline:
            return None
        stats = scheduler.stats()
        message = (
            f"{stats.num_running} requests are running and {stats.num_waiting} wait; "
            "the cache is in use"
        )
        return FlushCacheReply(call=call, success=False, message=message)


class EngineShutdown(Service):
    """Ends the engine: open requests have time until a deadline, and are aborted then."""

    name = "the end of the engine"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._deadline: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the engine is to end, and no request is open."""
        return self._deadline is not None and not self._core.loop.has_work

    def begin(self, deadline: float) -> None:
        self._deadline = deadline
        self._core.hooks.attach(self)

    def wake_at(self) -> float:
        return math.inf if self._deadline is None else self._deadline

    def before_step(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._core.scheduler.abort(Abort(all=True, message="the server is stopping"))
