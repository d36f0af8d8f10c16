"""The pass before a step if prefills are split by layers: an open prefill continues before another
one begins, and running requests decode between its pieces.

It wraps the pass that chooses requests, and chooses none itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.scheduler.admission import NewTokenRatio
from weft.scheduler.batch import Batch
from weft.scheduler.history import EventKind, RequestHistory, StepCounts, Stop
from weft.scheduler.prefill import PrefillScheduler, RoomForFirst
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.split.planner import SplitPlanner


def unmixed(settings: SchedulerSettings) -> SchedulerSettings:
    """The settings of the wrapped pass: running requests decode between pieces, not in them."""
    return replace(settings, mixed_chunk=False)


class SplitPrefills:
    """A `PrefillScheduler` that wraps another one, `unsplit`, whose batches `planner` plans."""

    def __init__(
        self,
        unsplit: PrefillScheduler,
        planner: SplitPlanner,
        *,
        history: RequestHistory,
        counts: StepCounts,
    ) -> None:
        self._unsplit = unsplit
        self._planner = planner
        self._history = history
        self._counts = counts

    def next_batch(self, now: float, order: Iterator[Request] | None = None) -> Batch | None:
        """The next layers of the open prefill, or the first layers of a new one; None if the
        running requests have their turn, or if no prompt can be computed."""
        planner = self._planner
        if planner.decode_is_due:
            self.record_no_walk(now, Stop.LAYERS if planner.open else Stop.TURN)
            return None
        if planner.open:
            self.record_no_walk(now, Stop.LAYERS)
            batch: Batch | None = planner.make_piece()
        else:
            batch = self._unsplit.next_batch(now, order)
        if batch is not None and batch.plan.layers is not None:
            self._counts.num_split += 1
            self._note(batch, now)
        return batch

    def room_for_first(self, now: float) -> RoomForFirst:
        """Like `PrefillScheduler`. No request can be admitted before the open prefill is
        complete."""
        if self._planner.open:
            return RoomForFirst([])
        return self._unsplit.room_for_first(now)

    def open_prompts(self) -> list[Request]:
        """The requests whose prompts are computed in part, by tokens or by layers."""
        found = self._planner.open_prompts()
        for request in self._unsplit.open_prompts():
            if request not in found:
                found.append(request)
        return found

    def row_released(self, request: Request) -> None:
        """A request is about to release its row."""
        self._planner.leave(request)
        self._unsplit.row_released(request)

    def reset(self) -> None:
        """No request has a row any more."""
        self._planner.reset()
        self._unsplit.reset()

    def apply(self, settings: SchedulerSettings) -> None:
        """Use these settings from the next pass on."""
        self._unsplit.apply(unmixed(settings))

    def record_no_walk(self, now: float, stop: Stop) -> None:
        """Record that no request is looked at before the next step, if some wait."""
        self._unsplit.record_no_walk(now, stop)

    # State of the wrapped pass

    @property
    def chunked_req(self) -> Request | None:
        return self._unsplit.chunked_req

    def note_room(self) -> None:
        """A request may be admitted again."""
        self._unsplit.note_room()

    @property
    def new_token_ratio(self) -> NewTokenRatio:
        return self._unsplit.new_token_ratio

    @property
    def seen(self) -> set[int]:
        return self._unsplit.seen

    # Inside

    def _note(self, batch: Batch, now: float) -> None:
        """Note a piece in the histories of its requests."""
        plan = batch.plan
        assert plan.layers is not None
        which = f"{plan.layers.first} to {plan.layers.last} of {plan.layers.num_layers}"
        why = f" ({self._planner.why})" if self._planner.why else ""
        ids = self._planner.ids_of(batch)
        for id, start, length in zip(ids, plan.starts.tolist(), plan.lens.tolist(), strict=True):
            tokens = f"for its tokens {start:,} to {start + length:,}"
            detail = f"computes {which}, {tokens}{why}"
            self._history.note(id, EventKind.LAYERS, detail, now, plan.step)
