"""Two policies: one decides, and the decisions of the other, its shadow, are only compared.

The shadow sees the same requests, columns and events. In every pass that admits a request, the
shadow's first choices are compared with the admitted requests; the differences are noted for each
request, and counted. This is not a simulation: the next pass begins in the state that the deciding
policy has reached. Both policies use aging. Resumed requests, which go first under every policy,
are not compared.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from weft.arrays import LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.history import ShadowCounts
from weft.scheduler.policies.protocol import AgingTurns, Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import NUM_HEAD, WaitingTable

MAX_NOTES = 4_096  # number of notes that are kept
SHADOW_BITS = 32  # bits of a tag; the lower ones belong to the deciding policy
LIVE_MASK = (1 << SHADOW_BITS) - 1
NEVER = -1.0


@dataclass(slots=True)
class ShadowNote:
    """How the shadow would have treated one request. Times are NEVER if there is no such event."""

    # when the shadow would first have admitted the request while it waited
    preferred_s: float = NEVER
    num_preferred: int = 0  # number of passes in which the shadow would have admitted it
    admitted_s: float = NEVER  # when the request was admitted
    # requests that the shadow would have looked at first; 0: it would have admitted it, too
    num_before: int = 0

    @property
    def earlier_s(self) -> float:
        """How much earlier the shadow would have admitted the request; 0: no earlier, or not
        admitted."""
        if self.preferred_s == NEVER or self.admitted_s == NEVER:
            return 0.0
        return self.admitted_s - self.preferred_s


class Walked:
    """One walk over the queue: the shadow's choices, and the admitted requests."""

    def __init__(
        self,
        now: float,
        head: list[Request],
    ) -> None:
        self.now = now
        self.head = head  # the shadow's first choices
        self.passed_over: set[int] = set()  # ids of requests that were not ready
        self.admitted: list[Request] = []  # admitted requests that never ran before


class Shadowed(Policy):
    """The policy `live` decides; its shadow does not."""

    def __init__(
        self,
        live: Policy,
        shadow: Policy,
        *,
        name: str,
        counts: ShadowCounts,
    ) -> None:
        super().__init__(live.context)
        self.live = live
        self.name = name  # of the shadow
        self._shadow = shadow
        self._counts = counts
        self._turns = AgingTurns()  # as the queue would give them under the shadow policy
        self._walked: Walked | None = None  # the last walk, until it is compared
        self._notes: OrderedDict[int, ShadowNote] = OrderedDict()  # by id
        self.ages = live.ages
        self.reads_cache = live.reads_cache or shadow.reads_cache
        self.classes = live.classes
        self.follower = self
        if live.displacement is not None:
            self.displacement = self

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        super().use_index(index, counts)
        self.live.use_index(index, counts)
        self._shadow.use_index(index, counts)

    def new_counts(self) -> SubtreeCounts | None:
        return self.live.new_counts() or self._shadow.new_counts()

    def notes(self) -> dict[int, ShadowNote]:
        """The notes by the id of the request, as far as they are kept."""
        self._compare()
        return dict(self._notes)

    def note_of(self, id: int) -> ShadowNote | None:
        """The note on a request; None: the policies agreed, or the note was dropped."""
        self._compare()
        return self._notes.get(id)

    def remember(self, before: Shadowed) -> None:
        """Keep the notes when another policy decides from now on, with the same shadow."""
        self._notes = OrderedDict(before.notes())

    # Set or removed while requests wait

    def introduce(
        self,
        waiting: Iterable[Request],
        tags: dict[int, int],
    ) -> dict[int, int]:
        """Introduce waiting requests to the shadow only. `tags`, by arrival order, are the tags of
        the deciding policy for requests that never ran. Returns the tags of both policies."""
        if self._shadow.follower is None:
            return tags
        both = {}
        for request in waiting:
            arrival_order = request.spec.arrival_order
            if arrival_order in tags:
                tag = self._shadow.follower.arrived(request)
                both[arrival_order] = tags[arrival_order] | tag << SHADOW_BITS
        return both

    def tags_of_live(self, tags: dict[int, int]) -> dict[int, int]:
        return {arrival_order: tag & LIVE_MASK for arrival_order, tag in tags.items()}

    # Events of a request

    def arrived(self, request: Request) -> int:
        tag = 0
        if self.live.follower is not None:
            tag = self.live.follower.arrived(request)
        if self._shadow.follower is not None:
            tag |= self._shadow.follower.arrived(request) << SHADOW_BITS
        return tag

    def dropped(self, request: Request) -> None:
        for policy in (self.live, self._shadow):
            if policy.follower is not None:
                policy.follower.dropped(request)

    def passed_over(self, request: Request) -> None:
        if self._walked is not None:
            self._walked.passed_over.add(request.id)
        if self.live.follower is not None:
            self.live.follower.passed_over(request)

    def admitted(self, request: Request) -> None:
        ran_before = request.retractions > 0 or request.spec.goes_first
        if self._walked is not None and not ran_before:
            self._walked.admitted.append(request)
        self._turns.admitted(request, counts=not ran_before)
        for policy in (self.live, self._shadow):
            if policy.follower is not None:
                policy.follower.admitted(request)

    def left(self, request: Request) -> None:
        self._compare()
        for policy in (self.live, self._shadow):
            if policy.follower is not None:
                policy.follower.left(request)

    def displaced(
        self,
        table: WaitingTable,
        indices: LongArray,
        newcomer: Request,
    ) -> Iterator[Request]:
        displacement = self.live.displacement
        assert displacement is not None
        return displacement.displaced(self._view_of_live(table), indices, newcomer)

    # The order

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        self._compare()
        self._walked = Walked(now, self._head(table, end, now))
        yield from self.live.order_waiting(self._view_of_live(table), end, now)

    def _head(
        self,
        table: WaitingTable,
        end: int,
        now: float,
    ) -> list[Request]:
        """The first requests that the shadow would look at."""
        shadow = self._shadow
        view = table
        if shadow.follower is not None:
            view = copy.copy(table)
            view.tag = table.tag >> SHADOW_BITS
        order = shadow.order_waiting(view, end, now)
        aging_s = self.context.settings.aging_s
        if aging_s and shadow.ages:
            order = self._turns.interleave(table.came_by(now - aging_s, end), order)
        return list(islice(order, NUM_HEAD))

    def _view_of_live(self, table: WaitingTable) -> WaitingTable:
        if self._shadow.follower is None:
            return table
        view = copy.copy(table)
        view.tag = table.tag & LIVE_MASK
        return view

    # Comparison

    def _compare(self) -> None:
        """Compare the last walk with the shadow's choices, if it admitted requests."""
        walked = self._walked
        self._walked = None
        if walked is None or not walked.admitted:
            return
        head = [one for one in walked.head if one.id not in walked.passed_over]
        chosen = head[: len(walked.admitted)]
        chosen_ids = {one.id for one in chosen}
        admitted_ids = {one.id for one in walked.admitted}
        self._counts.num_admissions += len(walked.admitted)
        for request in walked.admitted:
            self._admitted(request, walked, head, is_chosen=request.id in chosen_ids)
        for request in chosen:
            if request.id not in admitted_ids:
                self._preferred(request, walked.now)

    def _admitted(
        self,
        request: Request,
        walked: Walked,
        head: list[Request],
        *,
        is_chosen: bool,
    ) -> None:
        note = self._notes.get(request.id)
        if note is not None:
            note.admitted_s = walked.now
        if is_chosen:
            return
        self._counts.num_later += 1
        note = self._note(request.id)
        note.admitted_s = walked.now
        note.num_before = next(
            (index for index, one in enumerate(head) if one is request), len(head)
        )

    def _preferred(
        self,
        request: Request,
        now: float,
    ) -> None:
        note = self._note(request.id)
        note.num_preferred += 1
        if note.preferred_s == NEVER:
            note.preferred_s = now
            self._counts.num_earlier += 1

    def _note(self, id: int) -> ShadowNote:
        note = self._notes.get(id)
        if note is None:
            note = ShadowNote()
            self._notes[id] = note
            if len(self._notes) > MAX_NOTES:
                self._notes.popitem(last=False)
        return note
