"""Keeps the KV of chats that wait for the results of tools, between the engine's steps: see
`scheduler/features/tool_pauses.py`, which decides."""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.tiers.service import TierService
from weft.messages.pins import ToolPause
from weft.observe.log import EventLog
from weft.scheduler.features.tool_pauses import ToolPausesFeature
from weft.scheduler.history import EventKind

log = EventLog("cache")


class ToolPauses(Service):
    """Attached while a chat is pinned for its pause."""

    name = "pauses for tools"

    def __init__(
        self, core: EngineCore, feature: ToolPausesFeature, tiers: TierService | None
    ) -> None:
        self._core = core
        self.feature = feature
        self._tiers = tiers
        feature.wake = self.wake

    def wake(self) -> None:
        self._core.hooks.attach(self)

    def paused(self, message: ToolPause, now: float) -> None:
        """A request has ended with calls of tools."""
        detail = self.feature.pause(message.id, message.tools, self._core.scheduler.kv, now)
        chat = self.feature.chats.get(message.id)
        if self._tiers is not None and chat is not None and chat.is_pinned:
            self._tiers.store(chat.key)
        if detail:
            self._note(message.id, detail, now)
            log.debug("tool_pause", id=message.id, tools=message.tools, detail=detail)

    def wake_at(self) -> float:
        return self.feature.due_s

    def after_step(self, now: float) -> None:
        for chat in self.feature.expire(now):
            detail = (
                f"its KV is not kept any more: the pause is longer than {now - chat.began_s:,.1f} s"
            )
            self._note(chat.id, detail, now)
        if not self.feature.num_pinned:
            self._core.hooks.detach(self)

    def _note(self, id: int, detail: str, now: float) -> None:
        scheduler = self._core.scheduler
        step = scheduler.planner.num_steps
        scheduler.history.note_ended(id, EventKind.PINNED, detail, now, step)
