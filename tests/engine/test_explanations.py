"""Whoever waits has a reason, whatever the policy, the pace and the memory; and its numbers are
those of the moment at which it was refused, computed here once more from the pool, the tree and the
requests alone."""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import msgspec
import pytest

import weft.scheduler
from tests.scheduler.admission import make_adder, make_kv, make_request
from tests.scheduler.flow_world import FlowWorld
from tests.scheduler.random_worlds import drive, random_settings
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import Patience, settings
from tests.scheduler.streams import Streams
from tests.scheduler.world import World
from tests.seeds import seeds
from weft.arrays import IntArray
from weft.engine import explain as insight
from weft.memory.allocator import num_pages_for
from weft.messages.control import Explanation, RequestRow
from weft.scheduler import policies
from weft.scheduler.admission import AddResult, Lack, PrefillAdder
from weft.scheduler.batch import NO_ROWS, Batch
from weft.scheduler.feature import Feature
from weft.scheduler.history import MAX_EVENTS, MAX_PASSES, EventKind, Stop
from weft.scheduler.pace.pace import StepBudget
from weft.scheduler.prefill import PrefillScheduler, lacking
from weft.scheduler.request import NO_ROW, Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.waiting.line import WaitingLine

MOST_NEW = 4_096  # tokens that a request is expected to generate at most


MAX_EXPLAINED = 2  # in each step: explaining costs more than listing


def unlocked_tokens(scheduler: Scheduler, request: Request | None = None) -> int:
    """Tokens of the pool that nobody needs now; with a `request`, as if it had locked its
    prefix."""
    kv = scheduler.kv
    locked = set()
    users = [
        one for one in scheduler.requests.values() if one.row != NO_ROW or one.prefix.is_locked
    ]
    if request is not None:
        users.append(request)
    num_own = 0
    for user in users:
        if user.row != NO_ROW:
            num_computed = int(kv.columns.kv_len[user.row])
            num_own += num_pages_for(num_computed - user.prefix.length, kv.page_size)
        node = user.prefix.handle if kv.cache.shares else None
        while node is not None and node.key:
            locked.add((id(node), len(node.key)))
            node = node.parent
    num_locked = sum(len_bytes // 4 for _, len_bytes in locked) // kv.page_size
    return kv.room.capacity - (num_own + num_locked) * kv.page_size


def expected_of_running(scheduler: Scheduler, ratio: float) -> float:
    """What those that decode may generate yet: all of it where they ignore the end token, else in
    part."""
    whole = 0
    parts = 0
    for row in scheduler.running_batch.rows:
        request = scheduler.kv.columns.requests[row]
        left = request.max_len - int(scheduler.kv.columns.seq_len[row])
        left = min(max(left, 0), MOST_NEW)
        if request.message.sampling.ignore_eos:
            whole += left
        else:
            parts += left
    return whole + parts * ratio


class Witness:
    """Looks on while requests are refused for memory, and computes the numbers of that moment
    anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = Counter[Lack]()
        self.scheduler: Scheduler | None = None
        self.decode_rows: IntArray = NO_ROWS  # that the step decodes besides
        add_one = PrefillAdder.add_one_req
        make = PrefillScheduler._new_adder
        plan = Scheduler.get_next_batch_to_run
        witness = self

        def begins(scheduler: Scheduler, now: float, *, in_flight: bool) -> Batch | None:
            witness.scheduler = scheduler
            return plan(scheduler, now, in_flight=in_flight)

        def make_adder(
            prefills: PrefillScheduler, line: WaitingLine, decode_rows: IntArray, now: float
        ) -> PrefillAdder:
            witness.decode_rows = decode_rows
            return make(prefills, line, decode_rows, now)

        def watched(adder: PrefillAdder, request: Request, *, has_chunked_req: bool) -> AddResult:
            num_before = len(adder.can_run)
            seen = witness.numbers(adder, request)
            result = add_one(adder, request, has_chunked_req=has_chunked_req)
            if len(adder.can_run) == num_before:
                witness.check(adder, result, seen)
            return result

        monkeypatch.setattr(PrefillAdder, "add_one_req", watched)
        monkeypatch.setattr(Scheduler, "get_next_batch_to_run", begins)
        monkeypatch.setattr(PrefillScheduler, "_new_adder", make_adder)

    def numbers(self, adder: PrefillAdder, request: Request) -> tuple[int, set[int]]:
        """What the request needs, and what there is before and after its prefix is locked."""
        scheduler = self.scheduler
        assert scheduler is not None
        page_size = scheduler.settings.page_size

        def charge(num_tokens: int, one: Request, *, with_output: bool) -> int:
            new = min(one.max_len - one.fill_len, MOST_NEW) if with_output else 0
            return num_pages_for(num_tokens, page_size) * page_size + page_size + new

        first = next(scheduler.waiting_queue.online.order(scheduler.now), None)
        retractions = 0 if first is None else first.retractions
        ratio = scheduler.prefills.new_token_ratio.current
        if retractions:
            ratio = min(1.0, max(ratio, 1 / 16) * 2.0**retractions)
        columns = scheduler.kv.columns
        promised = expected_of_running(scheduler, ratio)
        for row in self.decode_rows:
            num_new = num_pages_for(int(columns.seq_len[row]), page_size)
            promised += (num_new - num_pages_for(int(columns.kv_len[row]), page_size)) * page_size
        is_alone = not len(scheduler.running_batch.rows) and scheduler.prefills.chunked_req is None
        for place, one in enumerate(adder.can_run):
            is_whole = one.extend_end == one.fill_len
            with_output = is_whole and not (place == 0 and is_alone and one.row == NO_ROW)
            promised += charge(one.extend_len, one, with_output=with_output)
        left = request.fill_len - request.kv_len
        if is_alone and not adder.can_run:
            needed = num_pages_for(left, page_size) * page_size
        else:
            needed = charge(left, request, with_output=True) + 1
        there = {
            unlocked_tokens(scheduler) - promised,
            unlocked_tokens(scheduler, request) - promised,
        }
        return needed, {max(math.floor(tokens), 0) for tokens in there}

    def check(self, adder: PrefillAdder, result: AddResult, seen: tuple[int, set[int]]) -> None:
        shortage = adder.shortage
        assert shortage is not None
        assert (shortage.lack is Lack.MEMORY) == (result is AddResult.NO_TOKEN)
        assert shortage.needed > shortage.available >= 0
        self.count[shortage.lack] += 1
        if shortage.lack is Lack.MEMORY:
            needed, available = seen
            assert shortage.needed == needed
            assert shortage.available in available


def check_same(row: RequestRow, explanation: Explanation) -> None:
    """What both say of a request is the same."""
    own = msgspec.structs.asdict(row)
    explained = msgspec.structs.asdict(explanation)
    shared = own.keys() & explained.keys()
    assert shared > {"state", "position", "why", "output_tokens", "cached_tokens"}
    assert {name: own[name] for name in shared} == {name: explained[name] for name in shared}


def check_reasons(world: World, reasons: Counter[str]) -> None:
    """Every request that waits has one, in its row of the list and in its explanation, too; and it
    is no excuse."""
    scheduler = world.scheduler
    num_explained = 0
    rows = {row.id: row for row in insight.list_requests(scheduler, world.time, 10_000)}
    for request in scheduler.waiting_queue:
        why = insight.Reasons(scheduler).of(request)
        assert why
        assert rows[request.id].why == why
        if num_explained < MAX_EXPLAINED:
            num_explained += 1
            check_same(rows[request.id], told(world, request.id))
        wait = scheduler.history.trace(request.id).waits[-1]  # type: ignore[union-attr]
        if (
            wait.since_walk <= scheduler.history.num_walks and wait.until_s == math.inf
        ):  # a walk could have found it
            assert why != insight.NOT_LOOKED_AT
            assert not why.startswith("taken back")
        reasons["".join(letter for letter in why if not letter.isdigit())] += 1


class Watched(RecordedWorld):
    """Looks for a reason of each waiting request after every step."""

    reasons: Counter[str]

    def check_step(self) -> None:
        super().check_step()
        check_reasons(self, self.reasons)


NUM_WORLDS = 12


@cache
def run_watched(seed: int) -> tuple[Counter[str], Counter[Lack]]:
    """The reasons that were told in a random world, and what was lacking where requests were
    refused."""
    rng = random.Random(f"explanations {seed}")
    chosen = replace(
        random_settings(rng), schedule_policy=policies.names()[seed % len(policies.names())]
    )
    with pytest.MonkeyPatch.context() as patch:
        witness = Witness(patch)
        world = Watched(chosen, depth=rng.choice([0, 1, 2]))
        world.reasons = Counter()
        drive(world, rng, 25, switches=seed % 4 == 0)
    return world.reasons, witness.count


@pytest.mark.parametrize("seed", seeds(NUM_WORLDS, 40))
def test_each_waiting_request_has_a_reason_with_the_numbers_of_its_moment(seed: int) -> None:
    reasons, _ = run_watched(seed)
    assert reasons


def test_the_random_worlds_reach_every_reason() -> None:
    reasons = Counter[str]()
    lacks = Counter[Lack]()
    for seed in range(NUM_WORLDS):
        told, lacking = run_watched(seed)
        reasons += told
        lacks += lacking
    assert all(lacks[lack] > 5 for lack in (Lack.MEMORY, Lack.TOKENS, Lack.TIME)), lacks
    for part in (
        *(
            "no KV memory for a prefill: it needs",
            "no KV memory for a prefill: r",
            "as many requests run as",
            "the batch is full",
        ),
        *(
            "the step has time for",
            "the tokens of the step were used up before",
            "the policy static admits no request",
        ),
        *(
            "the token budget of the step was used up",
            "running requests have their turn",
            "are being retracted",
        ),
        "taken back: ",
    ):
        assert sum(count for why, count in reasons.items() if part in why) > 3, (part, reasons)


class WatchedFlow(FlowWorld):
    """Blocks and pauses, too."""

    reasons: Counter[str]

    def check_step(self) -> None:
        super().check_step()
        check_reasons(self, self.reasons)


def test_blocked_input_and_paused_generation_are_reasons_to_wait() -> None:
    reasons = Counter[str]()
    for seed in range(8):
        world = WatchedFlow(seed)
        world.reasons = reasons
        world.drive(40)
    for part in ("the input is blocked", "generation is paused"):
        assert sum(count for why, count in reasons.items() if part in why) > 20, reasons


# Scenes that can be counted by hand


def row(world: World, id: int) -> RequestRow:
    (found,) = [
        one for one in insight.list_requests(world.scheduler, world.time, 100) if one.id == id
    ]
    return found


def told(world: World, id: int) -> Explanation:
    explained = insight.explain(world.scheduler, id, world.time)
    assert explained is not None
    return explained


def test_a_request_that_fits_only_without_its_own_prefix_names_the_locked_memory() -> None:
    """Its prefix counts as available until it is locked: then there is less than it needs."""
    world = World(settings(num_pages=100, max_running_requests=4, schedule_conservativeness=1.0))
    prefix = list(range(40))
    world.send(prefix, max_new_tokens=1)
    world.run_dry()
    world.send([200, 201], max_new_tokens=30, ignore_eos=True)
    world.step()
    late = world.send([*prefix, 250], max_new_tokens=35)
    world.step()
    why = row(world, late).why
    # 100 tokens - 2 of the running prompt - 29 that it will generate yet - 40 under the lock; 1 + 1
    # + 35, and one over
    numbers = (
        "it needs 38 tokens, 29 are available "
        "(of 58 free and 0 evictable; others are promised to running requests)"
    )
    assert why == f"waits: no KV memory for a prefill: {numbers}"


def test_a_static_batch_is_the_reason_of_those_that_may_not_join_it() -> None:
    world = World(settings(schedule_policy="static", max_running_requests=3))
    world.send([1, 2], max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    late = world.send([3], max_new_tokens=2)
    world.step()
    assert row(world, late).why == "waits: the policy static admits no request while others run"
    assert told(world, late).timeline[-1].what == row(world, late).why


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"max_step_ms": 20.0}, "--max-step-ms"),
        ({"max_slowdown": 1.5}, "--max-slowdown"),
        ({"max_step_ms": 20.0, "max_slowdown": 5.0}, "--max-step-ms or --max-slowdown"),
    ],
)
def test_time_and_not_memory_is_named_where_a_prompt_does_not_go_on_for_time(
    bounds: dict[str, float], named: str
) -> None:
    world = Streams(**bounds, page_size=16, num_pages=400)
    world.learn()
    for number in range(3):
        world.send([number], max_new_tokens=300, ignore_eos=True)
    for _ in range(3):
        world.step()
    long = world.send([7] * 1_500, max_new_tokens=2)
    behind = world.send([8] * 1_500, max_new_tokens=2)
    whys = Counter[str]()
    while not world.outputs[long]:
        world.step()
        whys[row(world, behind).why] += 1
    assert not any(
        "KV" in entry.what for one in (long, behind) for entry in told(world, one).timeline
    )
    assert (
        whys[f"waits: running requests have their turn before any more of a prompt ({named})"] > 3
    )


@pytest.mark.parametrize(
    ("budget", "changes", "lack"),
    [
        (None, {"mixed_kv": 400}, Lack.MEMORY),
        (StepBudget(0.0, (1.0, 0.0), 64, 0), {}, Lack.TIME),
        (None, {"mixed_tokens": 62}, Lack.TOKENS),
    ],
)
def test_an_open_prompt_that_does_not_go_on_is_told_what_was_short(
    budget: StepBudget | None, changes: dict[str, int], lack: Lack
) -> None:
    kv = make_kv(num_pages=100, page_size=4)
    request = make_request(kv, 200, 20)
    adder = make_adder(kv, chunked_prefill_size=64, budget=budget, **changes)
    assert adder.add_chunked_req(request) is request
    assert not adder.can_run
    assert adder.shortage is not None
    assert adder.shortage.lack is lack
    assert adder.shortage.needed > adder.shortage.available
    assert ("KV memory" in lacking(adder.shortage)) == (lack is Lack.MEMORY)


def test_waiting_for_a_prefix_of_the_same_step_is_a_reason() -> None:
    world = World(settings(chunked_prefill_size=-1, max_running_requests=8))
    prefix = list(range(60))
    world.send([*prefix, 100], max_new_tokens=9, ignore_eos=True)
    second = world.send([*prefix, 101], max_new_tokens=9, ignore_eos=True)
    world.step()
    assert row(world, second).why == "another request of this step computes its prefix"


def test_waiting_while_running_requests_make_room_is_a_reason() -> None:
    world = World(
        settings(schedule_policy="priority", max_running_requests=1, preemption_threshold=0),
        depth=1,
    )
    world.send([1], max_new_tokens=30, ignore_eos=True)
    for _ in range(4):
        world.step()
    high = world.send([2], max_new_tokens=2, priority=9)
    world.step()
    assert (
        row(world, high).why
        == "waits: running requests are being retracted for one of a far higher priority"
    )


def test_a_row_has_what_decides_about_the_request() -> None:
    world = World(settings(max_running_requests=1, max_run_s=50.0))
    first = world.send(
        [1], max_new_tokens=30, ignore_eos=True, priority=2, tenant="key-1", user="u"
    )
    second = world.send([2], max_new_tokens=2, timeout_ms=9_000)
    for _ in range(3):
        world.step()
    one = row(world, first)
    other = row(world, second)
    assert one.priority == 2
    assert one.tenant == "key-1"
    assert one.user == "u"
    assert one.timeout_s == 48.0
    assert one.retractions == 0
    assert one.why == ""
    assert other.priority == 0
    assert other.tenant == ""
    assert other.user == ""
    assert other.timeout_s == 6.0
    assert other.retractions == 0
    assert other.why == "waits: as many requests run as --max-running-requests allows (1)"


def test_a_story_that_is_cut_says_so_and_how_much_is_left_out() -> None:
    world = World(settings(max_running_requests=1))
    world.send([1], max_new_tokens=150, ignore_eos=True)
    waiting = world.send([2], max_new_tokens=2)
    world.step()
    for number in range(100, 170):  # each a reason of its own: another request is first
        world.scheduler.history.begin_walk()
        world.scheduler.history.record_pass(
            world.time, world.scheduler.planner.num_steps, Stop.NO_TOKEN, number
        )
    timeline = told(world, waiting).timeline
    (cut,) = [entry for entry in timeline if entry.what.startswith("left out here")]
    num_reasons = sum(entry.what.startswith("waits") for entry in timeline)
    assert num_reasons == insight.MAX_PASSES_SHOWN
    assert cut.what == f"left out here: {71 - num_reasons} earlier reasons for waiting"
    assert (
        timeline.index(cut)
        == next(i for i, entry in enumerate(timeline) if entry.what.startswith("waits")) - 1
    )
    for number in range(MAX_PASSES):
        world.scheduler.history.begin_walk()
        world.scheduler.history.record_pass(
            world.time, world.scheduler.planner.num_steps, Stop.NO_TOKEN, number + 1_000
        )
    assert any(
        "that are not remembered any more" in entry.what for entry in told(world, waiting).timeline
    )


def test_events_that_are_dropped_from_a_long_story_leave_a_mark() -> None:
    world = World(settings())
    id = world.send([1], max_new_tokens=9, ignore_eos=True)
    history = world.scheduler.history
    for number in range(MAX_EVENTS + 9):
        history.note(id, EventKind.GRAMMAR, f"{number}", world.time, number)
    assert any(entry.what == "left out here: 10 events" for entry in told(world, id).timeline)


def test_a_request_held_for_its_own_sake_is_not_told_the_reason_of_those_behind_it() -> None:
    world = World(settings(max_running_requests=2), features=(Patience(),))
    world.send([0], max_new_tokens=12, ignore_eos=True)
    held = world.send([1], max_new_tokens=3)
    world.send([2], max_new_tokens=12, ignore_eos=True)
    behind = world.send([4], max_new_tokens=3)
    for _ in range(4):
        world.step()
    reasons = [entry.what for entry in told(world, held).timeline]
    assert row(world, behind).why.startswith("waits: as many")
    assert sum(what.startswith("waits") for what in reasons) <= 1, reasons


def test_every_feature_that_lets_requests_wait_says_for_what() -> None:
    found: set[type[Feature]] = set()
    for module in pkgutil.walk_packages(weft.scheduler.__path__, "weft.scheduler."):
        found.update(
            one
            for one in vars(importlib.import_module(module.name)).values()
            if isinstance(one, type) and issubclass(one, Feature) and "admit" in vars(one)
        )
    assert len(found - {Feature}) >= 3
    for one in found:
        assert one is Feature or one.why_waits is not Feature.why_waits, one
