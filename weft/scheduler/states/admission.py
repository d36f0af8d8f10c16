"""Admission to a batch if some layers keep a state: a request needs a slot for its state besides
memory for K and V, and can use a cached prefix only up to a snapshot of the state.
"""

from __future__ import annotations

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.scheduler.admission import (
    AddResult,
    Lack,
    PrefillAdder,
    PrefixSharing,
    Shortage,
)
from weft.scheduler.kv import KvMemory
from weft.scheduler.prefill import PrefillScheduler
from weft.scheduler.request import NO_ROW, Request
from weft.scheduler.states.kv import StatefulKv


class StatefulAdder(PrefillAdder):
    """The budgets of a pass over a `StatefulKv`."""

    _num_promised = 0  # slots promised to picked requests

    def lacking(self, request: Request) -> float:
        tokens = super().lacking(request)
        if self._has_slot(request):
            return tokens
        return max(tokens, 0.0)  # retracting any request frees a slot

    # Inside

    @property
    def _num_slots(self) -> int:
        """Slots that may still be promised."""
        assert isinstance(self._kv, StatefulKv)
        return self._kv.states.available - self._num_promised

    def _has_slot(self, request: Request) -> bool:
        return request.row != NO_ROW or self._num_slots > 0

    def _fits(self, request: Request, extend: int, reserve: int) -> bool:
        return self._has_slot(request) and super()._fits(request, extend, reserve)

    def _take(self, request: Request, extend: int, reserve: int) -> None:
        if request.row == NO_ROW:
            self._num_promised += 1
        super()._take(request, extend, reserve)

    def _no_token(self, request: Request, extend: int, reserve: int) -> AddResult:
        if self._has_slot(request):
            return super()._no_token(request, extend, reserve)
        self.shortage = Shortage(Lack.STATES, 1, 0)
        return AddResult.NO_TOKEN


class SnapshotSharing(PrefixSharing):
    """A request waits for the prefix of another one only if that one will leave a snapshot in the
    part that both have in common."""

    def __init__(self, kv: KvMemory) -> None:
        super().__init__(kv)
        assert isinstance(kv, StatefulKv)
        self._stateful = kv
        # of picked requests, up to their next snapshot
        self._beginnings: list[tuple[str, bytes]] = []

    def defers(self, request: Request) -> bool:
        namespace, tokens = request.cache_key(request.packed)
        # The last token is computed even if it is cached.
        reusable = tokens[: request.reusable_len * TOKEN_BYTES]
        found = request.prefix.length * TOKEN_BYTES
        for other_namespace, beginning in self._beginnings:
            if len(beginning) <= found or other_namespace != namespace:
                continue
            if reusable.startswith(beginning):
                self.num_deferred += 1
                return True
        return False

    def picked(self, request: Request) -> None:
        if not self._shares or not request.message.shares_kv:
            return
        namespace, tokens = request.cache_key(request.packed)
        length = self._stateful.next_copy(request)
        if length > request.kv_len:
            self._beginnings.append((namespace, tokens[: length * TOKEN_BYTES]))


class StatefulPrefills(PrefillScheduler):
    """Admits waiting requests under the budgets of a `StatefulKv`."""

    adder_type = StatefulAdder
    sharing_type = SnapshotSharing
