"""What a pass of the scheduler has to decide, worked out a second time in plain Python from what is
seen before it.

The rules are those of docs/guides/policies.md and of `admission.py`'s budgets, written down without
looking at how they are computed there: sets of pages instead of counters, lists instead of columns.
`Model.follow` has every pass of a world compared with it. Steps that are bounded in time are not
modelled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.scheduler.world import World
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.tree import pages_of
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Admission, Feature
from weft.scheduler.policies.protocol import Policy, RequestFollower
from weft.scheduler.prefill import RoomForFirst
from weft.scheduler.request import NO_ROW, Request, RequestState
from weft.scheduler.scheduler import Scheduler

LONGEST_EXPECTED = 4_096  # tokens that a request is expected to generate at most
STEPS_AFTER_RETRACTION = 20
PREFILL_STEP_COST = 32  # in tokens
SHARED_TO_WAIT = 32  # tokens that two requests of a pass must both lack for one to wait
MOST_DEFERRED = 64

Piece = tuple[int, int, int]  # id, first position, tokens


@dataclass
class SchedulingPass:
    """The outcome of looking for prompts to compute."""

    pieces: list[Piece] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)  # ids of decoding requests that join
    admitted: list[int] = field(default_factory=list)
    open_id: int | None = None  # whose prompt is partly computed afterwards
    is_full: bool = False
    looked_at: int = 0  # waiting requests


class Moody(Feature):
    """Lets some requests wait for some steps."""

    def __init__(self) -> None:
        self.now = lambda: 0

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if (request.id + self.now() // 3) % 5 == 0 else Admission.READY


class Pages:
    """Memory as sets: which pages somebody needs, and which could be had."""

    def __init__(self, world: World) -> None:
        scheduler = world.scheduler
        self.size = scheduler.settings.page_size
        self._kv = scheduler.kv
        self.with_row = [
            request for request in scheduler.requests.values() if request.row != NO_ROW
        ]
        self.paths = {request.id: self.path(request.prefix.handle) for request in self.with_row}
        self.locked = set().union(*self.paths.values()) if self.paths else set()
        own = sum(len(self.own(request)) for request in self.with_row)
        usable = self._kv.allocator.num_pages - len(self._kv.allocator.quarantined)
        self.available = usable - len(self.locked) - own

    def path(self, handle: Any) -> set[int]:
        return (
            set(pages_of(handle).tolist())
            if self._kv.cache.shares and handle is not None
            else set()
        )

    def prefix(self, request: Request) -> list[int]:
        """The pages of a waiting request's cached prefix. Only looks."""
        usable = request.reusable_len * TOKEN_BYTES
        place = self._kv.cache.tree.locate(request.cache_key(request.packed), usable)
        pages = pages_of(place.handle).tolist()
        return pages[: place.length // TOKEN_BYTES // self.size]

    def computed(self, request: Request) -> int:
        if request.state is RequestState.DECODING:
            return int(self._kv.columns.kv_len[request.row])
        return request.kv_len

    def own(self, request: Request) -> set[int]:
        """Pages of a row that are not the tree's."""
        pages = self._kv.rows.pages_of(request.row, 0, self.computed(request))
        return set(pages.tolist()) - self.paths[request.id]

    def up(self, tokens: int) -> int:
        """Whole pages for so many tokens, in tokens."""
        return math.ceil(tokens / self.size) * self.size

    def down(self, tokens: int) -> int:
        return tokens // self.size * self.size


class Model:
    """Beside a world; knows of it what anybody could see before each decision."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler = world.scheduler
        self.count = Counter[str]()  # what has been compared
        self.num_prefill_steps = 0
        self.totals = Counter[str]()  # as the counters of the scheduler should have them
        self.num_steps = 0
        self.num_copied = 0  # tokens that the pieces of a step lack, and that it copies
        self.cached: dict[
            int, int
        ] = {}  # tokens found cached when a request was first admitted, by id
        self.came_s = dict[int, float]()  # times of each request, by id
        self.admitted_s = dict[int, float]()
        self.first_token_s = dict[int, float]()
        self.follower = FollowerCheck()
        self._is_full = False
        self._given_up = 0  # rows, so far
        self._policy: object = None
        self._looked_at = 0
        self._turns: set[int] = set()  # whom the last order gave such a turn
        self._since_turn = 0  # admissions since the last overdue request's turn

    def follow(self) -> Model:
        """From now on compare every decision of the world's scheduler."""
        scheduler = self.scheduler
        self._wrap(scheduler.prefills, "next_batch", self._compare_pass)
        self._wrap(scheduler, "update_running_batch", self._compare_decode)
        self._wrap(scheduler.prefills, "room_for_first", self._compare_victims)
        self._wrap(scheduler, "merge_last_batch", self._check_merged)
        self._wrap(scheduler, "get_next_batch_to_run", self._count_step)
        self._wrap(scheduler, "set_policy", self._follow_switch)
        self._wrap(self.world, "take_in", self._note_arrival)
        self._wrap(self.world, "receive", self._note_tokens)
        self.follower.listen(scheduler.waiting_queue.online.policy)
        match = scheduler.kv.prefixes.match

        def counted(request: Request) -> None:
            self._looked_at += 1
            match(request)

        scheduler.kv.prefixes.match = counted  # type: ignore[method-assign]
        return self

    def _wrap(self, owner: object, name: str, compare: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: compare(real, *args, **kwargs))

    # Times

    def _note_arrival(
        self, real: Callable[[GenerateRequest], None], request: GenerateRequest
    ) -> None:
        self.came_s[request.id] = self.world.time
        real(request)

    def _note_tokens(self, real: Callable[[StepOutput], None], output: StepOutput) -> None:
        for id in np.frombuffer(output.ids, dtype=np.int64).tolist():
            self.first_token_s.setdefault(id, self.world.time)
        real(output)

    # A pass over the queue

    def _compare_pass(
        self,
        real: Callable[..., Batch | None],
        now: float,
        order_of_room: Iterator[Request] | None,
    ) -> Batch | None:
        scheduler = self.scheduler
        self._is_full &= not self._something_left()
        assert scheduler.waiting_queue.online.is_full == self._is_full, (
            "the batch is taken for full, or not, without a reason"
        )
        self.follower.compare(scheduler)
        order = self.expected_order()
        if order is not None:
            assert list(scheduler.waiting_queue.order(scheduler.now)) == order
        expected = self.expected_pass()
        admitted = [scheduler.requests[id] for id in expected.admitted]
        known = set(self.cached)
        self._count(expected, admitted)
        self._looked_at = 0
        batch = real(now, order_of_room)
        if order is None:  # nor does the model know who had an overdue one's turn
            turns = scheduler.waiting_queue.online._turns
            self._since_turn = 0 if turns is None else turns.num_since
        self.count["passes"] += 1
        self.count["open prompts"] += expected.open_id is not None
        self.count["mixed"] += bool(expected.decodes)
        self.num_prefill_steps += batch is not None
        pieces = [] if batch is None else self._pieces(batch)
        self._compare_pieces(pieces, expected.pieces, self.cached.keys() - known)
        if batch is not None and batch.plan.copies is not None:
            self.num_copied -= len(batch.plan.copies.targets)
        assert not self.num_copied
        if batch is not None:
            rows = batch.rows[len(batch.prefills) :]
            assert [scheduler.kv.columns.requests[row].id for row in rows] == expected.decodes
        open_id = scheduler.prefills.chunked_req.id if scheduler.prefills.chunked_req else None
        assert open_id == expected.open_id
        assert self._looked_at == expected.looked_at
        self._is_full = expected.is_full
        assert scheduler.waiting_queue.online.is_full == self._is_full
        return batch

    def _follow_switch(self, real: Callable[[str], None], name: str) -> None:
        """The new policy hears of those that wait, not of those that run."""
        real(name)
        self.count["switches"] += 1
        requests = self.scheduler.requests.values()
        self.follower = FollowerCheck()
        self.follower.waiting = {
            one.id for one in requests if one.row == NO_ROW and not one.retractions
        }
        self.follower.unknown = {one.id for one in requests if one.row != NO_ROW}
        self.follower.listen(self.scheduler.waiting_queue.online.policy)

    def _something_left(self) -> bool:
        """Whether a row was given up, or another policy chosen, since the last look."""
        before = self._given_up, self._policy
        self._given_up = int(self.scheduler.kv.columns.epoch.sum())
        self._policy = self.scheduler.waiting_queue.online.policy
        return before != (self._given_up, self._policy)

    def _count(self, expected: SchedulingPass, admitted: list[Request]) -> None:
        self.totals["prefilled_tokens"] += sum(length for _, _, length in expected.pieces)
        starts = {id: start for id, start, _ in expected.pieces}
        queue = self.scheduler.waiting_queue
        for request in admitted:
            if request.admitted_s < 0:
                self.totals["prompt_tokens"] += request.spec.prompt_len
                self.totals["cached_tokens"] += starts[request.id]
                self.cached[request.id] = starts[request.id]
                self.admitted_s[request.id] = self.world.time
            if request.id in self._turns:
                self._since_turn = 0
            elif not request.retractions or queue.online.policy.classes is not None:
                self._since_turn += 1

    def _compare_pieces(
        self, pieces: list[Piece], expected: list[Piece], newcomers: Set[int]
    ) -> None:
        """The first piece of a request may begin with some tokens that are copied from a page."""
        assert [id for id, _, _ in pieces] == [id for id, _, _ in expected]
        for (id, start, length), (_, begin, unsplit) in zip(pieces, expected, strict=True):
            assert start + length == begin + unsplit
            num_copied = start - begin
            assert 0 <= num_copied < self.scheduler.settings.page_size
            self.num_copied += num_copied
            self.totals["prefilled_tokens"] -= num_copied
            if id in newcomers:
                self.totals["cached_tokens"] += num_copied
                self.cached[id] += num_copied

    def _count_step(
        self, real: Callable[..., Batch | None], now: float, *, in_flight: bool
    ) -> Batch | None:
        batch = real(now, in_flight=in_flight)
        self.num_steps += batch is not None
        return batch

    def _check_merged(self, real: Callable[[], None]) -> None:
        """All that is computed of prompts is in the cache, for others to use."""
        real()
        if not self.scheduler.kv.cache.shares:
            return
        for request in Pages(self.world).with_row:
            computed = min(request.kv_len, request.fill_len) // self.scheduler.settings.page_size
            assert request.prefix.length // self.scheduler.settings.page_size >= computed

    def check_counters(self) -> None:
        """The world is at its end."""
        world, counters = self.world, self.scheduler.counters
        assert counters.steps.num_all == self.num_steps
        assert counters.steps.num_prefill == self.num_prefill_steps
        for name, number in self.totals.items():
            assert getattr(counters, "num_" + name) == number, name
        assert counters.num_generated_tokens == sum(map(len, world.outputs.values()))
        assert counters.num_retractions == sum(one.retractions for one in world.finished.values())
        assert counters.num_aborted == sum(one.reason == "abort" for one in world.finished.values())
        assert counters.num_requests == len(world.sent)
        for id, finish in world.finished.items():
            assert finish.cached_tokens == self.cached.get(id, 0)
            admitted_s = self.admitted_s.get(id, self.came_s[id])
            assert finish.queue_s == admitted_s - self.came_s[id]
            assert finish.prefill_s == self.first_token_s.get(id, admitted_s) - admitted_s

    # The queue

    def expected_order(self) -> list[Request] | None:
        """The waiting requests, best first; None where only the policy can know."""
        queue, settings, now = (
            self.scheduler.waiting_queue,
            self.scheduler.settings,
            self.scheduler.now,
        )
        key = KEYS.get(settings.schedule_policy)
        if key is None:
            return None
        resumed = sorted(
            (one for one in queue if one.retractions), key=lambda one: one.spec.arrival_order
        )
        fresh = [one for one in queue if not one.retractions]
        pages = Pages(self.world)
        fresh.sort(
            key=lambda one: (
                key(one, len(pages.prefix(one)) * pages.size, now),
                one.spec.arrival_order,
            )
        )
        goes_first = resumed
        if settings.schedule_policy == "priority":
            sign = 1 if settings.low_priority_first else -1
            fresh = sorted(
                [*resumed, *queue],
                key=lambda one: (
                    sign * one.message.priority,
                    not one.retractions,
                    one.spec.arrival_order,
                ),
            )
            fresh = list(dict.fromkeys(fresh))
            goes_first = []
        overdue = [one for one in fresh if 0 < settings.aging_s <= now - one.spec.arrival_s]
        overdue.sort(key=lambda one: one.spec.arrival_order)
        return goes_first + self._in_turns(
            fresh, [] if settings.schedule_policy == "fcfs" else overdue
        )

    def _in_turns(self, fresh: list[Request], overdue: list[Request]) -> list[Request]:
        """Every fourth place is for the oldest that is overdue."""
        order: list[Request] = []
        since = self._since_turn
        self._turns.clear()
        for request in fresh:
            left = [one for one in overdue if one not in order]
            if since >= 3 and left:
                order.append(left[0])
                self._turns.add(left[0].id)
                since = 0
            if request not in order:
                order.append(request)
                since += 1
        return order

    @staticmethod
    def _pieces(batch: Batch) -> list[Piece]:
        number = len(batch.prefills)
        places = zip(
            batch.prefills,
            batch.starts[:number].tolist(),
            batch.lens[:number].tolist(),
            strict=True,
        )
        return [(request.id, start, length) for request, start, length in places]

    def expected_pass(self) -> SchedulingPass:
        scheduler, settings = self.scheduler, self.scheduler.settings
        queue = scheduler.waiting_queue
        open_chunk = scheduler.prefills.chunked_req
        found = SchedulingPass(is_full=self._is_full, open_id=open_chunk.id if open_chunk else None)
        free_rows = max(settings.max_running_requests - len(Pages(self.world).with_row), 0)
        if open_chunk is None:
            if queue.next_line is None:
                return found
            if found.is_full or not free_rows:
                self.count["full"] += found.is_full
                found.is_full = True
                return found
        budget = Budget(self, found)
        if open_chunk is not None:
            budget.go_on(open_chunk)
        if not found.is_full:
            self._walk(budget, found, free_rows)
        if not found.pieces:
            found.decodes = []
        return found

    def _walk(self, budget: Budget, found: SchedulingPass, free_rows: int) -> None:
        num_deferred = 0
        queue = self.scheduler.waiting_queue
        for request in queue.order(self.scheduler.now):
            if len(found.admitted) >= free_rows:
                found.is_full = True
                return
            if self.is_held(request):
                self._pass_over(request)
                continue
            found.looked_at += 1
            if budget.is_computed_by_another(request):
                self._pass_over(request)
                num_deferred += 1
                if num_deferred == MOST_DEFERRED:
                    return
                continue
            if not budget.add(request):
                return

    def _pass_over(self, request: Request) -> None:
        follower = self.scheduler.waiting_queue.online.policy.follower
        if follower is not None:
            follower.passed_over(request)

    def is_held(self, request: Request) -> bool:
        """Whether a part lets it wait."""
        return not self.scheduler.hooks.may_run(request)

    def ratio(self) -> float:
        """The part of their outputs that running requests are expected to use."""
        now = self.scheduler.prefills.new_token_ratio.current
        queue = self.scheduler.waiting_queue
        first = next(iter(queue.order(self.scheduler.now)), None)
        if first is None or not first.retractions:
            return now
        return min(1.0, max(now, 1 / 16) * 2.0**first.retractions)

    def expected_output(self, request: Request, ratio: float) -> float:
        left = self._left_of(request)
        return left if request.message.sampling.ignore_eos else left * ratio

    def promised(self) -> float:
        """Tokens that running requests are expected to generate yet: all, of those that end of
        themselves a part."""
        running = self.running()
        surely = sum(self._left_of(one) for one in running if one.message.sampling.ignore_eos)
        perhaps = sum(self._left_of(one) for one in running if not one.message.sampling.ignore_eos)
        return surely + perhaps * self.ratio()

    def _left_of(self, request: Request) -> int:
        left = request.max_len - int(self.scheduler.kv.columns.seq_len[request.row])
        return max(0, min(left, LONGEST_EXPECTED))

    def running(self) -> list[Request]:
        return [
            self.scheduler.kv.columns.requests[row]
            for row in self.scheduler.running_batch.rows.tolist()
        ]

    def unfinished(self) -> list[Request]:
        """Those that need another step."""
        columns = self.scheduler.kv.columns
        return [
            request for request in self.running() if columns.seq_len[request.row] < request.max_len
        ]

    def decode_tokens(self, requests: list[Request]) -> int:
        columns = self.scheduler.kv.columns
        return sum(int(columns.seq_len[one.row] - columns.kv_len[one.row]) for one in requests)

    def decode_pages(self, requests: list[Request], size: int) -> int:
        """Pages that a decode step begins."""
        columns = self.scheduler.kv.columns
        places = (
            range(int(columns.kv_len[one.row]), int(columns.seq_len[one.row])) for one in requests
        )
        return sum(position % size == 0 for positions in places for position in positions)

    # A decode step

    def _compare_decode(
        self, real: Callable[..., Batch | None], *, in_flight: bool
    ) -> Batch | None:
        scheduler, pages = self.scheduler, Pages(self.world)
        requests, ratio = self.unfinished(), scheduler.prefills.new_token_ratio
        before = ratio.current
        fits = self.decode_pages(requests, pages.size) <= pages.available
        is_idle = not self.running()
        victims: list[int] = []
        if requests and not fits and not in_flight:
            victims = self._expected_victims(requests)
        chunk = scheduler.prefills.chunked_req
        batch = real(in_flight=in_flight)
        if not requests:
            assert batch is None
            if is_idle:
                self._is_full = False
                assert ratio.current == ratio.init
        elif fits:
            assert batch is not None
            assert batch.rows.tolist() == [one.row for one in requests]
            step = (ratio.init - ratio.min) / 600
            assert ratio.current == max(before - step, ratio.min)
        elif in_flight:
            assert batch is None
            assert ratio.current == before
        else:
            assert batch is not None
            self._check_retraction(batch, requests, victims, chunk)
        return batch

    def _check_retraction(
        self, batch: Batch, requests: list[Request], victims: list[int], chunk: Request | None
    ) -> None:
        kept = [one for one in requests if one.id not in victims]
        assert batch.rows.tolist() == [one.row for one in kept]
        taken_back = [one.id for one in requests if one.state is RequestState.WAITING]
        assert sorted(taken_back) == sorted(victims)
        self.count["retracted"] += len(victims)
        done = sum(self.scheduler.kv.columns.num_output(one.row) for one in kept)
        allowed = sum(one.max_len - one.spec.prompt_len for one in kept)
        expected = min(1.0, (done + STEPS_AFTER_RETRACTION * len(kept)) / (allowed + 1))
        assert self.scheduler.prefills.new_token_ratio.current == expected
        if chunk is not None and chunk.row == NO_ROW:
            assert len(kept) == 1, "the open chunk goes only for the last"

    def _expected_victims(self, requests: list[Request]) -> list[int]:
        """Who is taken back, one after the other, until the others have room for a while."""
        pages = Pages(self.world)
        kept, gone, available = list(requests), [], pages.available

        def missing() -> int:
            steps = len(kept) * STEPS_AFTER_RETRACTION
            return (
                max(self.decode_pages(kept, pages.size) * pages.size, steps)
                - available * pages.size
            )

        while len(kept) > 1 and (not gone or missing() > 0):
            victim = self.cheapest(kept, pages, gone, max(missing(), pages.size))
            available += len(self.freed(victim, pages, gone))
            kept.remove(victim)
            gone.append(victim.id)
        return gone

    def freed(self, request: Request, pages: Pages, gone: list[int]) -> set[int]:
        """Pages that nobody needs any more when this request leaves too."""
        others = (
            pages.paths[one.id]
            for one in pages.with_row
            if one.id != request.id and one.id not in gone
        )
        return (pages.paths[request.id] - set().union(*others)) | pages.own(request)

    def cheapest(
        self, requests: list[Request], pages: Pages, gone: list[int], missing: int
    ) -> Request:
        """Who loses least for what is gained: the lowest class first."""
        rank = self.scheduler.waiting_queue.rank

        def cost(request: Request) -> tuple[float, ...]:
            freed = len(self.freed(request, pages, gone)) * pages.size
            gained = min(freed, missing)
            if not gained:
                return (-rank(request), math.inf, freed, -request.spec.arrival_order)
            cannot_stay = pages.computed(request) % pages.size
            lost = gained + cannot_stay + PREFILL_STEP_COST
            return (
                -rank(request),
                lost / gained * (1 + request.retractions),
                freed,
                -request.spec.arrival_order,
            )

        return min(requests, key=cost)

    # Preemption

    def _compare_victims(
        self,
        real: Callable[..., RoomForFirst],
        now: float,
    ) -> RoomForFirst:
        scheduler = self.scheduler
        ratio = scheduler.prefills.new_token_ratio.current
        expected = self._expected_preempted(now, scheduler.prefills.chunked_req, ratio)
        room = real(now)
        assert [one.id for one in room.victims] == expected
        self.count["preempted"] += len(room.victims)
        return room

    def _expected_preempted(self, now: float, chunk: Request | None, ratio: float) -> list[int]:
        """Whose place the first that waits takes: of a far lower class, none that waited too long
        before, and only if that is enough."""
        settings, queue = self.scheduler.settings, self.scheduler.waiting_queue
        if settings.schedule_policy.split(" > ")[0] != "priority":
            return []
        first = next(iter(queue.order(now)), None)
        if first is None or self.is_held(first):
            return []
        sign = 1 if settings.low_priority_first else -1
        below = [
            one
            for one in ([chunk] if chunk is not None else self.running())
            if sign * one.message.priority - sign * first.message.priority
            > settings.preemption_threshold
            and not 0 < settings.aging_s <= now - one.spec.arrival_s
        ]
        if chunk is not None:
            return [one.id for one in below]
        pages = Pages(self.world)
        prefix = pages.prefix(first)
        left = (pages.available - len(set(prefix) - pages.locked)) * pages.size - self.promised()
        new = min(first.max_len - first.fill_len, LONGEST_EXPECTED)
        rest = first.fill_len - len(prefix) * pages.size
        lacking = pages.up(rest) + pages.size + new - left
        completions = Completions.of(self)
        if completions is not None and completions.knows(first):
            step_tokens = min(settings.chunk_len or rest, settings.max_prefill_tokens)
            is_whole = settings.chunk_len is None or rest <= step_tokens
            lacking = completions.lacking(first, rest, is_whole=is_whole)
        victims: list[Request] = []
        while lacking >= 0 or len(pages.with_row) - len(victims) >= settings.max_running_requests:
            if not below:
                return []
            victim = self.cheapest(below, pages, [], max(int(lacking), pages.size))
            lacking -= len(self.freed(victim, pages, [])) * pages.size + self.expected_output(
                victim, ratio
            )
            below.remove(victim)
            victims.append(victim)
        return [one.id for one in victims]


KEYS: dict[str, Callable[[Request, int, float], float]] = {
    "fcfs": lambda request, cached, now: 0,
    "lpm": lambda request, cached, now: -cached,
    "shortest-prefill-first": lambda request, cached, now: request.fill_len - cached,
    "hrrn": lambda request, cached, now: (
        (request.spec.arrival_s - now) / (request.fill_len - cached)
    ),
    "lof": lambda request, cached, now: request.spec.prompt_len - request.max_len,
    "priority": lambda request, cached, now: 0,
}  # of a waiting request with so many cached tokens; the lowest goes first


class FollowerCheck:
    """A follower before the one of a policy. Each request arrives, and then is dropped, or
    admitted and left, again and again."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.unknown: set[int] = set()  # that ran before it was chosen
        self._real: RequestFollower | None = None

    def listen(self, policy: Policy) -> None:
        self._real = policy.follower
        policy.follower = self

    def compare(self, scheduler: Scheduler) -> None:
        """The policy knows who waits and who runs, and nothing was wrong with what it was told."""
        assert not scheduler.outbox.faults
        requests = scheduler.requests.values()
        assert self.running | self.unknown == {one.id for one in requests if one.row != NO_ROW}
        assert self.waiting == {
            one.id for one in requests if one.row == NO_ROW and not one.retractions
        }

    def arrived(self, request: Request) -> int:
        assert request.id not in self.waiting | self.running
        self.waiting.add(request.id)
        return 0 if self._real is None else self._real.arrived(request)

    def dropped(self, request: Request) -> None:
        self.waiting.remove(request.id)
        if self._real is not None:
            self._real.dropped(request)

    def passed_over(self, request: Request) -> None:
        if self._real is not None:
            self._real.passed_over(request)

    def admitted(self, request: Request) -> None:
        assert request.row != NO_ROW
        assert (request.id in self.waiting) == (not request.retractions)
        self.waiting.discard(request.id)
        self.running.add(request.id)
        if self._real is not None:
            self._real.admitted(request)

    def left(self, request: Request) -> None:
        assert request.row != NO_ROW
        (self.unknown if request.id in self.unknown else self.running).remove(request.id)
        if self._real is not None:
            self._real.left(request)


class Completions:
    """Which running requests will have ended when, told step by step: the memory of those whose end
    is known comes back, one page of each is not counted on, and whoever may end or advance
    otherwise has all that it may need."""

    def __init__(self, model: Model) -> None:
        self._kv = model.scheduler.kv
        self._size = self._kv.page_size
        self._free = float(Pages(model.world).available * self._size)
        self._ends: list[
            tuple[int, int]
        ] = []  # tokens until the end, and tokens of pages until now
        self._open: dict[int, int] = {}
        for request in model.running():
            if self.knows(request):
                held = int(self._kv.columns.kv_len[request.row])
                left = request.max_len - int(self._kv.columns.seq_len[request.row])
                self._ends.append((max(left, 0), self._up(held)))
            else:
                self._free -= model.expected_output(request, model.ratio()) + self._size
        chunk = model.scheduler.prefills.chunked_req
        if chunk is not None:
            self._open[chunk.id] = self._up(chunk.max_len - chunk.kv_len) + self._size

    @staticmethod
    def knows(request: Request) -> bool:
        sampling = request.message.sampling
        return sampling.ignore_eos and sampling.grammar is None

    @staticmethod
    def of(model: Model) -> Completions | None:
        """None where memory is shared, or where not all get one token a step."""
        settings = model.scheduler.settings
        one_each = not settings.draft_sources and settings.num_stages == 1
        if model.scheduler.kv.cache.shares or not one_each or settings.split_prefill_layers:
            return None
        return Completions(model)

    def lacking(self, request: Request, rest: int, *, is_whole: bool) -> int:
        """At the worst moment; below 0: there is room."""
        free = self._free - self._up(rest) - sum(self._open.values())
        output = request.max_len - request.fill_len
        ends = list(self._ends)
        if is_whole:
            ends.append((output, self._up(request.fill_len)))
        else:
            free -= output + self._size
        free = math.floor(free)
        worst = -free if not ends else -math.inf
        running = sorted(ends)
        while running:
            left, held = running[0]
            worst = max(worst, (left + self._size) * len(running) - free)
            free += held
            del running[0]
        return int(worst)

    def take(self, request: Request, tokens: int, new: int) -> None:
        self._open.pop(request.id, None)
        self._free -= self._up(tokens)
        rest = request.fill_len - request.kv_len - tokens
        if rest:
            output = request.max_len - request.kv_len
            self._open[request.id] = self._up(output) - self._up(tokens) + self._size
        elif self.knows(request):
            self._ends.append((request.max_len - request.fill_len, self._up(request.fill_len)))
        else:
            self._free -= new + self._size

    def _up(self, tokens: int) -> int:
        return -(-tokens // self._size) * self._size


class Budget:
    """What a pass may still take: memory now, memory with foresight, tokens of the step."""

    def __init__(self, model: Model, found: SchedulingPass) -> None:
        self._model = model
        self._found = found
        scheduler, settings = model.scheduler, model.scheduler.settings
        self.pages = Pages(model.world)
        self._locked = set(self.pages.locked)
        self._available = self.pages.available * self.pages.size
        self._is_alone = not model.running() and scheduler.prefills.chunked_req is None
        self._heads: list[tuple[Request, int]] = []  # picked, and where its cached prefix ends
        self._chunk = settings.chunk_len
        self._input = settings.max_prefill_tokens
        self._now = 0.0  # memory that this step takes
        self._promised = model.promised()
        self._completions = Completions.of(model)
        if settings.mixed_chunk and self._chunk is not None:
            self._mix(min(self._chunk, self._input))

    def _mix(self, most: int) -> None:
        model, size = self._model, self.pages.size
        requests = model.unfinished()
        tokens, num_pages = model.decode_tokens(requests), model.decode_pages(requests, size)
        if tokens + size > most:
            return
        if num_pages > self.pages.available:
            model.count["no memory to mix"] += 1
            return
        assert self._chunk is not None
        self._chunk -= tokens
        self._input -= tokens
        self._now += num_pages * size
        self._promised += num_pages * size
        self._found.decodes = [one.id for one in requests]

    @property
    def _left_now(self) -> float:
        return self._available - self._now

    @property
    def _left(self) -> float:
        return self._available - self._promised

    def go_on(self, request: Request) -> None:
        """The open prompt: as much as there is room for."""
        assert self._chunk is not None
        self._heads.append((request, request.prefix.length))
        rest, room = request.fill_len - request.kv_len, min(self._chunk, self._input)
        if rest <= room and self.pages.up(rest) <= self._left_now:
            self._take(request, request.kv_len, rest, self._new(request))
            self._found.open_id = None
            return
        piece = self.pages.down(int(min(room, self._left_now)))
        if 0 < piece < rest:
            self._take(request, request.kv_len, piece, 0)

    def is_computed_by_another(self, request: Request) -> bool:
        """Whether a request that is picked computes the beginning of what this one lacks."""
        if not self._model.scheduler.kv.cache.shares:
            return False
        start = len(self.pages.prefix(request)) * self.pages.size
        end = start + max(SHARED_TO_WAIT, self.pages.size)
        if min(request.fill_len, request.reusable_len) < end:
            return False
        return any(
            head_start == start
            and head.fill_len >= end
            and head.message.cache_salt == request.message.cache_salt
            and head.message.shares_kv
            and head.packed[: 4 * end] == request.packed[: 4 * end]
            for head, head_start in self._heads
        )

    def add(self, request: Request) -> bool:
        """Take a waiting request if there is room. Returns whether to go on with the next."""
        found, pages = self._found, self.pages
        cached = pages.prefix(request)
        start = len(cached) * pages.size
        rest = request.fill_len - start
        runs_alone = self._is_alone and not found.pieces
        new = 0 if runs_alone else self._new(request)
        prefix = set(cached) - self._locked
        left = self._left - len(prefix) * pages.size
        fits = pages.up(rest) <= left if runs_alone else pages.up(rest) + pages.size + new < left
        completions = self._completions
        if completions is not None and completions.knows(request) and not runs_alone:
            is_whole = self._chunk is None or rest <= min(self._chunk, self._input)
            self._model.count["simulated"] += 1
            if completions.lacking(request, rest, is_whole=is_whole) >= 0:
                self._model.count["refused by simulation"] += 1
                return False
            fits = True
        self._model.count["exact fits"] += pages.up(rest) + pages.size + new == left
        if not fits:
            found.is_full = True
            return False
        if self._chunk is None:
            if found.pieces and pages.up(rest) > self._input:
                return False
            piece = rest
        else:
            piece = min(self._chunk, self._input)
            if rest <= piece:
                piece = rest
            else:
                piece = pages.down(piece)
                if piece <= 0 or found.open_id is not None:
                    return False
                found.open_id = request.id
                new = 0
        self._locked |= prefix
        self._available -= len(prefix) * pages.size
        self._take(request, start, piece, new)
        self._heads.append((request, start))
        found.admitted.append(request.id)
        if completions is None and (self._left <= 0 or self._left_now <= 0):
            found.is_full = True
            return False
        return self._input > 0 and (self._chunk is None or self._chunk > 0)

    def _take(self, request: Request, start: int, tokens: int, new: int) -> None:
        charged = self.pages.up(tokens)
        if self._completions is not None:
            self._completions.take(request, tokens, new)
        self._now += charged
        self._promised += charged + self.pages.size + new
        self._input -= charged
        if self._chunk is not None:
            self._chunk -= charged
        self._found.pieces.append((request.id, start, tokens))

    @staticmethod
    def _new(request: Request) -> int:
        return min(request.max_len - request.fill_len, LONGEST_EXPECTED)
