"""The store that an engine uses, as long as it answers, and its transfers."""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.memory.tiers.protocol import Tiers
from weft.observe.log import EventLog
from weft.scheduler.settings import TierSettings
from weft.scheduler.tiers.transfers import Transfers

# A longer transfer is cancelled; if the store does not confirm that either, its pages are lost.
HUNG_S = 30.0

log = EventLog("cache")


class UsedStore:
    def __init__(self, core: EngineCore, tiers: Tiers) -> None:
        settings = core.scheduler.settings.tiers
        assert settings is not None, "there is a store, and settings that do not know of it"
        self._core = core
        self.settings: TierSettings = settings
        self.tiers = tiers
        self.transfers = Transfers(core.scheduler.kv, settings, tiers)
        self._has_opened = False
        self.is_shut = False  # it is not used any more

    @property
    def is_open(self) -> bool:
        """Whether the store is open, for the weights in use."""
        return self._has_opened and not self.is_shut and not self.transfers.is_stale

    def opened(self) -> None:
        """The store says that it is open."""
        self._has_opened = True
        self.transfers.reopened()

    def begin(self) -> None:
        """Begin the transfers that need not wait for a launched step any more."""
        first = self._core.loop.first_in_flight
        if first is None:
            first = self._core.scheduler.planner.num_steps
        self.transfers.begin(first)

    def end_hung(self, now: float) -> None:
        """Cancel transfers that take too long. If a read does not end even then, its pages are
        quarantined, and the store is not used any more."""
        for ticket, transfer in self.transfers.table.items():
            if now < transfer.since_s + HUNG_S:
                continue
            is_lost = transfer.is_cancelled
            if not is_lost:
                self.transfers.cancel(ticket, now)
            if is_lost or not transfer.is_reading:
                self._shut(f"the {self.settings.where} does not answer")
            if is_lost:
                log.error("pages_lost", pages=len(transfer.pages), after_s=2 * HUNG_S)
                self.transfers.give_up(ticket)
                self._core.settle()
                self._core.recovery.shrink()

    def _shut(self, why: str) -> None:
        """Stop using the store."""
        self.is_shut = True
        self.tiers.stop(why)
