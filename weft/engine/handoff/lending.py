"""On a server that computes prompts for others: how long their KV is kept.

    a request with a room ends ─▶ its path is locked, and lent (`LendFeature`)
    the other server asks      ─▶ the lease is renewed
    returned, or expired       ─▶ unlocked

This service does not know the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.memory.handoff.leases import Lease
from weft.memory.handoff.protocol import Handoff
from weft.scheduler.feature import Note
from weft.scheduler.features.handoff import UNWANTED, LendFeature
from weft.scheduler.history import EventKind
from weft.scheduler.settings import HandoffSettings


class LendService(Service):
    """Attached all the time, if prompts are computed for others."""

    name = "what is lent"

    def __init__(
        self,
        core: EngineCore,
        feature: LendFeature,
        handoff: Handoff,
        settings: HandoffSettings,
    ) -> None:
        self._core = core
        self.feature = feature
        self._handoff = handoff
        self._settings = settings
        self._leases = core.scheduler.kv.leases
        self._leases.lend_through(handoff)
        # leases with the last step that was planned before them
        self._begun: list[tuple[int, Lease]] = []
        self.num_ended = 0  # leases that ended before they were returned

    @property
    def waiting(self) -> dict[int, int]:
        """Requests that wait for another server: none on this server."""
        return {}

    def wake_at(self) -> float:
        return self._leases.due_s

    def before_step(self, now: float) -> None:
        self._look(now)

    def after_step(self, now: float) -> None:
        self._look(now)

    def aborted(self, ids: Sequence[int]) -> None:
        """End the leases of requests that had ended when their abort came: whoever has left before
        the answer sends nobody to fetch their KV."""
        for room, id in list(self.feature.lent.items()):
            if id in ids and self._leases.give_back(room, UNWANTED):
                self._let_go(room, f"its KV is not lent any more: {UNWANTED}")

    def _look(self, now: float) -> None:
        news = self._handoff.take()
        for room in news.renewed:
            self._leases.renew(room, now + self._settings.lease_s)
        for room in news.returned:
            if self._leases.give_back(room):
                self._let_go(room, "its KV was taken, or is not needed any more")
            elif room in self.feature.rooms.values():
                self.feature.unwanted.add(room)
        self._leases.expire(now)
        for ended in self._leases.take_ended():
            self.num_ended += 1
            if ended.name not in self._leases:  # otherwise the room is another request's now
                self._let_go(ended.name, f"its KV is not lent any more: {ended.why}")
        step = self._core.scheduler.planner.num_steps
        for id, detail in self.feature.notes:
            self._core.scheduler.history.note_later(id, EventKind.HANDOFF, detail, now, step)
        self.feature.notes.clear()
        self._lend()

    def _lend(self) -> None:
        """Lend the leases whose pages no launched step writes any more."""
        num_steps = self._core.scheduler.planner.num_steps
        for lease in self.feature.begun:
            self._begun.append((num_steps - 1, lease))
        self.feature.begun.clear()
        first = self._core.loop.first_in_flight
        if first is None:
            first = num_steps
        later: list[tuple[int, Lease]] = []
        for planned_step, lease in self._begun:
            if planned_step >= first:
                later.append((planned_step, lease))
            elif self._leases.holds(lease):
                pages = np.array(lease.pages, dtype=np.int32)
                self._handoff.lend(lease.name, lease.key, pages, lease.resume_state)
        self._begun = later

    def _let_go(self, room: str, detail: str) -> None:
        id = self.feature.lent.pop(room, None)
        if id is not None:
            self.feature.notes.append(Note(id, detail))
        self._core.scheduler.memory_came_back()

    def numbers(self) -> dict[str, int]:
        """The numbers by their names in `Stats`."""
        report = self._handoff.report()
        page_size = self._core.scheduler.settings.page_size
        return {
            "num_handoff_bootstrap": len(self.feature.rooms),
            "num_handoff_inflight": len(self._leases),
            "kv_lent": self._leases.num_pages * page_size,
            "total_handoff_tokens": self.feature.num_lent,
            "total_handoff_bytes": report.num_bytes,
            "total_handoff_faults": report.faults,
            "total_handoff_expired": self.num_ended,
        }
