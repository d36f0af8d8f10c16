"""`TieredKv` for models in which some layers have memory of their own: windows with pages of their
own, or states. For these layers, a store has the ending of a sequence (`memory/tiers/endings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.arrays import IntArray
from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.prefix_cache import PrefixCache
from weft.memory.tiers.endings import StateEndings, WindowEndings
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import StateSettings, TierSettings, WindowSettings
from weft.scheduler.states.kv import StatefulKv
from weft.scheduler.tiers.kv import TieredKv
from weft.scheduler.windows.kv import WindowedKv


class TieredStatefulKv(TieredKv, StatefulKv):
    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: PrefixCache,
        columns: Columns,
        states: StateSettings,
        tiers: TierSettings,
    ) -> None:
        StatefulKv.__init__(self, rows, allocator, cache, columns, states)
        self._begin_transfers(tiers, StateEndings(self.states))

    def usage(self) -> dict[str, int]:
        usage = super().usage()
        usage["state_slots_used"] += self.states.num_lent
        return usage

    # Inside

    def _slots_owned_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        owned = super()._slots_owned_by(requests)
        for ticket, transfer in self.transfers.items():
            if transfer.is_reading:
                owned[f"read {ticket}"] = transfer.ending
        return owned


class TieredWindowedKv(TieredKv, WindowedKv):
    def __init__(
        self,
        rows: RowTable,
        allocator: PageAllocator,
        cache: PrefixCache,
        columns: Columns,
        windows: WindowSettings,
        chunk_len: int | None,
        tiers: TierSettings,
    ) -> None:
        WindowedKv.__init__(self, rows, allocator, cache, columns, windows, chunk_len)
        self._begin_transfers(tiers, WindowEndings(self.windows, tiers.block_len))

    # Inside

    def _held_by(self, requests: Mapping[str, Request]) -> dict[str, IntArray]:
        return {**super()._held_by(requests), **self._held_apart()}

    def _held_apart(self) -> dict[str, IntArray]:
        held = super()._held_apart()
        for ticket, transfer in self.transfers.items():
            held[f"transfer {ticket}"] = transfer.ending
        for lease in self.leases:
            held[f"lease {lease.name}"] = lease.ending
        return held
