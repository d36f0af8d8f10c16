"""Adapters (LoRA): which requests may run together, so that no step needs more adapters than there
are slots. This is the only place with that rule.

    running | picked | pinned | kept for one that waits  ≤  max_loras_per_batch

The sets have distinct adapters; the model without an adapter counts as one while a request runs on
it. A request that lacks a slot is passed over, and others go before it.

To prevent starvation, an overdue request (`aging_s`) that lacks a slot reserves the next free one;
the oldest such request does. For it, one running adapter closes: the adapter whose requests have
the fewest tokens left. It admits no younger request until the reserving request has got its row. So
the oldest overdue request gets a slot when the longest request of one adapter has ended, and a
request with k older ones in the queue after k + 1 such times, whatever arrives later. From then on
it waits no longer than without adapters (`waiting/queue.py`).

`engine/adapters.py` says which adapters are loaded, and in which slots; this module reads no
files.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import IntArray
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.plan.step import BASE
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, QueueWalk, StepInputs
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import Refusal
from weft.scheduler.request import Columns, Request, RequestState

NO_ADAPTER = ""  # uid of the model without an adapter


class LoadedAdapter:
    """An adapter in the memory of the device."""

    __slots__ = ("adapter_slot", "is_leaving", "is_pinned", "name", "num_open", "uid")

    def __init__(self, uid: str, adapter_slot: int, name: str, *, is_pinned: bool = False) -> None:
        self.uid = uid
        self.adapter_slot = adapter_slot
        self.name = name  # the name given at loading, for texts
        self.is_pinned = is_pinned  # it has a slot as long as it is loaded
        self.is_leaving = False  # it takes no more requests
        self.num_open = 0  # requests that use it


class AdaptersFeature(Feature):
    """Keeps the loaded adapters, and the adapter of each open request."""

    request_fields = ("adapter",)
    changes_layers = True

    def __init__(self, max_together: int, num_adapter_slots: int, num_rows: int) -> None:
        """`num_adapter_slots`: number of adapters that may be loaded; 0: none."""
        self.max_together = max_together
        self.num_adapter_slots = num_adapter_slots
        # By uid, least recently used first.
        self.loaded: dict[str, LoadedAdapter] = {}
        self._by_id: dict[int, str] = {}  # uid of the adapter of an open request
        self._slot_of_row: IntArray = np.full(num_rows, BASE, dtype=np.int32)
        self.num_rows: dict[str, int] = {}  # requests with a row, by uid of their adapter
        # The request that reserves a slot until it has its row, and the adapter that closes for it.
        self._claim: Request | None = None
        self._closing: str | None = None
        # Of the current walk: the adapters that have a slot, including those of picked requests.
        self._walk_number = -1
        self._num_picked = 0
        self._taken: set[str] = set()

    # Loaded ones

    def add(self, adapter: LoadedAdapter) -> None:
        """The adapter has been loaded onto the device."""
        self.loaded[adapter.uid] = adapter

    def forget(self, uid: str) -> None:
        """The adapter will be unloaded; no open request uses it."""
        assert not self.loaded[uid].num_open, "an adapter in use was unloaded"
        del self.loaded[uid]

    def free_slot(self, reserved: set[int]) -> int | None:
        """A slot without an adapter that is not reserved; None if there is none."""
        taken = reserved.union(adapter.adapter_slot for adapter in self.loaded.values())
        return next(
            (
                adapter_slot
                for adapter_slot in range(self.num_adapter_slots)
                if adapter_slot not in taken
            ),
            None,
        )

    def least_used(self) -> LoadedAdapter | None:
        """The adapter to unload when another one needs its slot: the least recently used adapter
        that no request uses and that is not pinned; None if there is none."""
        for adapter in self.loaded.values():
            if not (adapter.num_open or adapter.is_pinned or adapter.is_leaving):
                return adapter
        return None

    @property
    def num_pinned(self) -> int:
        return sum(adapter.is_pinned for adapter in self.loaded.values())

    # Moments of a request

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        if not self.num_adapter_slots:
            return Refusal("this server takes no adapters; start it with --enable-lora", 400)
        adapter = self.loaded.get(message.adapter)
        if adapter is None:
            return Refusal("the adapter is not loaded any more", 404)
        if adapter.is_leaving:
            return Refusal(f"the adapter {adapter.name!r} is being unloaded", 404)
        return None

    def arrive(self, message: GenerateRequest) -> None:
        adapter = self.loaded.pop(message.adapter)
        self.loaded[message.adapter] = adapter
        adapter.num_open += 1
        self._by_id[message.id] = message.adapter

    def why_not_batched(self, request: Request, walk: QueueWalk) -> str:
        self._follow(walk)
        claim = self._live_claim()
        adapter = request.message.adapter
        if claim is not None and adapter == self._closing and _is_younger(request, claim):
            return (
                f"waits for an adapter slot: {self._called(adapter)} admits no requests for a while"
            )
        taken = self._taken
        if adapter in taken:
            return ""
        num_taken = len(taken)
        if claim is not None and claim.message.adapter not in taken | {adapter}:
            num_taken += 1
        if num_taken < self.max_together:
            return ""
        if walk.is_overdue(request, walk.now):
            self._keep_slot(request, walk)
        return f"waits for an adapter slot; adapters in use: {self.max_together}, the limit"

    def enter_row(self, request: Request) -> None:
        uid = request.message.adapter
        self._slot_of_row[request.row] = self.loaded[uid].adapter_slot
        self.num_rows[uid] = self.num_rows.get(uid, 0) + 1

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        adapters: IntArray = self._slot_of_row[batch.rows]
        if (adapters != BASE).any():
            step.adapters = adapters

    def release(self, request: Request) -> None:
        if self._slot_of_row[request.row] == BASE:
            return
        self._slot_of_row[request.row] = BASE
        uid = request.message.adapter
        self.num_rows[uid] -= 1
        if not self.num_rows[uid]:
            del self.num_rows[uid]

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        uid = self._by_id.pop(request.id, None)
        if uid is not None:
            self.loaded[uid].num_open -= 1

    # Slots

    def _follow(self, walk: QueueWalk) -> None:
        """Update the adapters that have a slot, with the requests picked since the last call of
        this walk."""
        if walk.number != self._walk_number:
            self._walk_number = walk.number
            self._num_picked = 0
            self._taken = set(self.num_rows)
            if walk.kv.rows.num_used > sum(self.num_rows.values()):
                self._taken.add(NO_ADAPTER)
            for adapter in self.loaded.values():
                if adapter.is_pinned:
                    self._taken.add(adapter.uid)
        for request in walk.picked[self._num_picked :]:
            self._taken.add(request.message.adapter)
        self._num_picked = len(walk.picked)

    def _live_claim(self) -> Request | None:
        """The request that reserves a slot, if it still waits."""
        if self._claim is not None and self._claim.state is not RequestState.WAITING:
            self._claim = None
            self._closing = None
        return self._claim

    def _keep_slot(self, request: Request, walk: QueueWalk) -> None:
        """Reserve the next slot for this request, unless an older request has done so."""
        if self._claim is None or _is_younger(self._claim, request):
            self._claim = request
        if self._closing is None:
            self._closing = self._first_to_end(walk)

    def _first_to_end(self, walk: QueueWalk) -> str | None:
        """The adapter whose requests have the fewest tokens left to compute; None if all running
        adapters are pinned."""
        left: dict[str, int] = {}
        for row, request in _with_row(walk.kv.columns):
            uid = request.message.adapter
            of_row = int(walk.kv.columns.max_len[row] - walk.kv.columns.kv_len[row])
            left[uid] = max(left.get(uid, 0), of_row)
        for adapter in self.loaded.values():
            if adapter.is_pinned:
                left.pop(adapter.uid, None)
        if not left:
            return None
        return min(left, key=lambda uid: (left[uid], uid))

    def _called(self, uid: str) -> str:
        """Its name in texts."""
        return repr(self.loaded[uid].name) if uid else "the model without an adapter"


def _is_younger(request: Request, other: Request) -> bool:
    return request.spec.arrival_order > other.spec.arrival_order


def _with_row(columns: Columns) -> Iterator[tuple[int, Request]]:
    """The requests that have a row."""
    for row, request in enumerate(columns.requests):
        if request is not None:
            yield row, request
