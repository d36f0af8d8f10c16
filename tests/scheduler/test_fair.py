"""Fair shares for tenants: the bound of `docs/guides/policies.md`, with the settings that are
served.

What a tenant was given is counted here from what came back: tokens of its prompts that were not
cached, and generated tokens, which count double. The numbers are those of the documentation, not of
the code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.scheduler.crowd import ROWS, Crowd, given, served_settings
from tests.scheduler.scenes import Patience, settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import seeds
from weft.bench.overhead import message_of
from weft.config.engine import EngineConfig
from weft.messages.requests import Abort
from weft.scheduler.policies.kinds.fair import Fair
from weft.scheduler.policies.kinds.lpm import LongestPrefix
from weft.scheduler.policies.tenants.left import TenantLanes, TenantsLeft
from weft.scheduler.policies.tenants.long_walk import LongWalk
from weft.scheduler.policies.tenants.walk import NextTenant, TenantTurn, Walk
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, WaitingTable

LEAD = 4_096  # service by which the cache may put a tenant ahead


@pytest.mark.parametrize(
    ("num_tenants", "flood_len", "weights", "num_shared"),
    [
        (10, 300, "", 0),
        (10, 3_000, "", 0),
        (40, 300, "", 0),
        (10, 300, "t0=3,t5=0.5", 0),
        (10, 300, "", 160),
    ],
    ids=["a flood", "a flood of long prompts", "40 tenants", "weights", "shared prefixes"],
)
def test_what_two_tenants_are_given_differs_by_no_more_than_the_bound(
    num_tenants: int, flood_len: int, weights: str, num_shared: int
) -> None:
    """The first tenant comes with 400 requests at once, the others have always three that
    wait."""
    max_new = 24
    tenants = [f"t{place}" for place in range(num_tenants)]
    world = World(served_settings(tenant_weights=weights), depth=1)
    assert world.settings.aging_s == EngineConfig().aging_s > 0
    share = dict.fromkeys(tenants, 1.0) | world.settings.tenant_shares
    lengths = dict.fromkeys(tenants, 300) | {"t0": flood_len}
    bound = 2 * (
        LEAD + max((lengths[tenant] + 2 * ROWS * max_new) / share[tenant] for tenant in tenants)
    )
    depths = dict.fromkeys(tenants, 3)
    crowd = Crowd(world, lengths, depths | {"t0": 400}, max_new=max_new, num_shared=num_shared)
    crowd.fill_up()
    crowd.depths = depths
    seen = [dict.fromkeys(tenants, 0.0)]
    for number in range(1, 321):
        crowd.fill_up()
        world.step(check=False)
        if number % 40 == 0:
            seen.append({tenant: given(world, tenant) / share[tenant] for tenant in tenants})
    assert min(seen[-1].values()) > 1_000
    for place, later in enumerate(seen):
        for before in seen[:place]:
            grown = [later[tenant] - before[tenant] for tenant in tenants]
            assert max(grown) - min(grown) <= bound


def small_world(**changes: object) -> World:
    """Without a cache, so that nobody is ahead for it."""
    values = {
        "schedule_policy": "fair",
        "max_running_requests": 4,
        "prefix_cache": False,
        "aging_s": 30.0,
        **changes,
    }
    return World(settings(**values))


def differs_by(world: World, tenants: tuple[str, str], num_steps: int) -> int:
    """How much more the first is given than the second in the next steps, in which both always want
    more."""
    before = [given(world, tenant) for tenant in tenants]
    for _ in range(num_steps):
        world.step(check=False)
    waiting = {request.message.tenant for request in world.scheduler.waiting_queue}
    assert waiting >= set(tenants)
    grown = [given(world, tenant) - was for tenant, was in zip(tenants, before, strict=True)]
    assert sum(grown) > 500
    return grown[0] - grown[1]


def flood(world: World, tenant: str, number: int, max_new: int = 10) -> list[int]:
    return [
        world.send([1, 2], max_new_tokens=max_new, ignore_eos=True, tenant=tenant)
        for _ in range(number)
    ]


SMALL = 2 * (
    2 + 2 * 4 * 10
)  # the bound of `small_world`: prompts of 2 tokens, 4 rows, outputs of 10


def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    world = small_world()
    flood(world, "busy", 400)
    for _ in range(200):
        world.step(check=False)
    flood(world, "late", 200)
    assert abs(differs_by(world, ("busy", "late"), 150)) <= SMALL


def test_a_tenant_saves_nothing_up_while_one_request_of_it_runs_and_none_waits() -> None:
    world = small_world()
    flood(world, "slow", 1, max_new=180)
    flood(world, "busy", 400)
    for _ in range(170):
        world.step(check=False)
    flood(world, "slow", 200)
    assert abs(differs_by(world, ("busy", "slow"), 150)) <= SMALL


def test_a_tenant_served_more_is_not_forgiven_after_a_pause() -> None:
    world = small_world(max_running_requests=1, aging_s=0.0)
    flood(world, "busy", 1, max_new=90)
    world.step(check=False)
    flood(world, "others", 20)
    for _ in range(80):
        world.step(check=False)
    flood(world, "busy", 1)
    order = [request.message.tenant for request in world.scheduler.waiting_queue.order(world.time)]
    assert order == ["others"] * 20 + ["busy"]


def test_in_one_order_turns_go_by_weight() -> None:
    world = small_world(max_running_requests=1, aging_s=0.0, tenant_weights="heavy=2")
    flood(world, "runs", 1, max_new=90)
    world.step(check=False)
    flood(world, "light", 12)
    flood(world, "heavy", 12)
    order = [request.message.tenant for request in world.scheduler.waiting_queue.order(world.time)]
    # More than are found by a look at all tenants.
    for num in (6, 12, 18):
        assert order[:num].count("heavy") == 2 * num // 3


def test_a_token_of_a_prompt_counts_half_as_much_as_a_generated_one() -> None:
    world = World(
        settings(
            schedule_policy="fair",
            num_pages=4_000,
            context_length=600,
            max_running_requests=1,
            prefix_cache=False,
        )
    )
    # Both kinds are 202 units of service: 200 + 2 · 1, and 10 + 2 · 96.
    for number in range(24):
        world.send([number] * 200, max_new_tokens=1, ignore_eos=True, tenant="reads")
        world.send([number] * 10, max_new_tokens=96, ignore_eos=True, tenant="writes")
    while len(world.finished) < 20:
        world.step(check=False)
    tenants = [world.sent[id].tenant for id in world.finished]
    assert 9 <= tenants.count("reads") <= 11


def test_aborted_requests_are_forgotten() -> None:
    """Else the tenant of requests that never ran would be the least served for ever, and whoever
    comes begin there."""
    world = small_world()
    for id in flood(world, "gone", 5):
        world.abort(Abort(ids=(id,)))
    flood(world, "busy", 400)
    for _ in range(200):
        world.step(check=False)
    flood(world, "late", 200)
    assert abs(differs_by(world, ("busy", "late"), 150)) <= SMALL


def test_requests_that_are_not_ready_cost_their_tenant_nothing() -> None:
    patience = Patience()
    world = World(settings(schedule_policy="fair", prefix_cache=False), features=(patience,))
    for number in range(800):
        is_early = number < 400  # 200 that are not ready stand before all that are
        tenant = "patient" if is_early or number % 4 == 0 else "other"
        world.send([1, 2], max_new_tokens=10, ignore_eos=True, tenant=tenant)
        if is_early == (number % 2 == 0):
            world.abort(Abort(ids=(number,)))
    for _ in range(20):
        world.step(check=False)
    assert abs(differs_by(world, ("patient", "other"), 120)) <= SMALL


def test_overdue_requests_of_a_tenant_have_every_fourth_of_its_turns() -> None:
    world = World(
        settings(schedule_policy="fair", max_running_requests=1, aging_s=10.0, num_pages=190)
    )
    hot = list(range(100, 140))
    world.send(hot, max_new_tokens=1, tenant="a")
    world.run_dry()
    old = [world.send([5, number], max_new_tokens=1, tenant="a") for number in range(3)]
    world.time += 20.0
    new = [world.send([*hot, number], max_new_tokens=1, tenant="a") for number in range(20)]
    admitted: list[int] = []
    while len(admitted) < len(old) + len(new):
        world.step()
        admitted += [id for id in world.finished if id in {*old, *new} and id not in admitted]
    places = [admitted.index(id) for id in old]
    assert places == sorted(places)
    assert max(after - before for before, after in zip([-1, *places], places, strict=False)) <= 4
    assert admitted[0] in new


def test_the_age_of_a_flood_takes_no_turn_from_other_tenants() -> None:
    world = small_world(max_running_requests=1)
    flood(world, "old", 50, max_new=1)
    world.time += 100.0
    flood(world, "new", 50, max_new=1)
    order = [request.message.tenant for request in world.scheduler.waiting_queue.order(world.time)]
    assert order[:20].count("old") == 10


def warm_world() -> tuple[World, list[int]]:
    """A prefix is cached, and nobody waits."""
    world = World(settings(schedule_policy="fair", max_running_requests=1, num_pages=400))
    hot = list(range(100, 140))
    world.send(hot, max_new_tokens=1, tenant="first")
    world.run_dry()
    return world, hot


def test_the_cache_may_put_a_tenant_ahead_by_the_lead_and_no_more() -> None:
    world, hot = warm_world()
    lead = 0
    for number in range(2_600):
        waiting = [request.message.tenant for request in world.scheduler.waiting_queue]
        if waiting.count("cold") < 3:
            world.send([number % VOCAB, 7], max_new_tokens=1, tenant="cold")
        if waiting.count("warm") < 3:
            world.send([*hot, number % VOCAB], max_new_tokens=3, ignore_eos=True, tenant="warm")
        world.step(check=False)
        if number % 200 == 199:
            lead = max(lead, given(world, "warm") - given(world, "cold"))
    assert 1_000 < lead <= LEAD + 40 + 2 * 3


def test_one_of_four_turns_is_of_the_least_served_however_many_new_tenants_bring_cached_prefixes() -> (
    None
):
    world, hot = warm_world()
    lonely = world.send([5] * 40, max_new_tokens=1, tenant="lonely")
    for number in range(200):
        while len(world.scheduler.waiting_queue) < 6:
            world.send(
                [*hot, number % VOCAB, len(world.sent) % VOCAB],
                max_new_tokens=1,
                tenant=f"t{len(world.sent)}",
            )
        if lonely in world.finished:
            break
        world.step(check=False)
    assert len(world.finished) <= 1 + 4


def test_tenants_that_want_nothing_are_forgotten() -> None:
    world = small_world()
    for number in range(300):
        world.send([1], max_new_tokens=1, tenant=f"t{number}")
        world.run_dry(check=False)
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, Fair)
    assert len(policy._tenants._numbers) < 20


def test_a_tenant_that_fills_the_queue_makes_room_for_the_share_of_others() -> None:
    world = small_world(max_running_requests=1, max_queued_requests=12, tenant_weights="half=0.5")
    flood(world, "running", 1)
    world.step(check=False)  # no row is free
    early = flood(world, "many", 20)
    refused = [id for id in early if id in world.finished or id not in world.scheduler.requests]
    assert refused == early[12:]
    few = flood(world, "few", 9)
    half = flood(world, "half", 9)
    waiting = [request.message.tenant for request in world.scheduler.waiting_queue]
    assert {tenant: waiting.count(tenant) for tenant in ("many", "few", "half")} == {
        "many": 5,
        "few": 5,
        "half": 2,
    }
    world.run_dry(check=False)
    served = [id for id in (*early, *few, *half) if world.finished[id].status == 200]
    assert served == [*early[:5], *few[:5], *half[:2]]
    assert {world.finished[id].status for id in (*early, *few, *half)} == {200, 503}


def test_tenants_whose_requests_were_aborted_before_they_ran_are_forgotten() -> None:
    world = small_world()
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, Fair)
    for number in range(300):
        world.abort(Abort(ids=(world.send([1], max_new_tokens=1, tenant=f"t{number}"),)))
        assert len(policy._tenants._numbers) < 20


def test_a_new_tenant_begins_beside_the_least_served_however_few_requests_of_it_wait() -> None:
    world = small_world(max_running_requests=1, aging_s=0.0)
    flood(world, "busy", 5, max_new=90)
    world.step(check=False)
    flood(world, "single", 1)
    for _ in range(60):
        world.step(check=False)  # what generates is served more and more
    flood(world, "late", 1)
    order = [request.message.tenant for request in world.scheduler.waiting_queue.order(world.time)]
    assert order[:3] == ["single", "late", "busy"]


class PlainWalk:
    """Who is next, with lists: each request is (tenant, cached tokens); the first `num_overdue` are
    overdue. `first`: places that go first within their tenants, in this order; None: the longest
    cached prefix does."""

    def __init__(
        self, requests: list[tuple[int, int]], num_overdue: int, first: list[int] | None = None
    ) -> None:
        self.left = dict(enumerate(requests))  # by place
        self._num_overdue = num_overdue
        self._first = first

    def next(
        self, served: list[float], since_oldest: list[int], *, may_leave_due: bool
    ) -> tuple[int, TenantTurn]:
        oldest: dict[int, int] = {}
        for place, (tenant, _) in self.left.items():
            oldest.setdefault(tenant, place)
        wants = {
            one
            for one, place in oldest.items()
            if since_oldest[one] >= 3 and place < self._num_overdue
        }
        due = min(oldest, key=lambda tenant: (served[tenant], oldest[tenant]))
        mine = [place for place, (tenant, _) in self.left.items() if tenant == due]
        place = oldest[due] if due in wants else self._best(mine)
        if may_leave_due and self._first is None:
            may_go = {tenant for tenant in oldest if served[tenant] <= served[due] + LEAD}
            free = [place for place, (tenant, _) in self.left.items() if tenant in may_go - wants]
            bound = [oldest[tenant] for tenant in sorted(may_go & wants)]
            rivals = ([self._longest(free)] if free else []) + bound
            rival = max(rivals, key=lambda one: self.left[one][1])
            if self.left[rival][1] > self.left[place][1]:
                place = rival
        tenant = self.left[place][0]
        return place, TenantTurn(tenant, is_due=tenant == due, is_oldest=tenant in wants)

    def _best(self, places: list[int]) -> int:
        if self._first is None:
            return self._longest(places)
        return min(places, key=[*self._first, *self.left].index)

    def _longest(self, places: list[int]) -> int:
        return max(places, key=lambda place: self.left[place][1])


def waiting_table(requests: list[tuple[int, int]]) -> WaitingTable:
    """A queue of (tenant, cached tokens), whose arrivals are their places."""
    waiting = WaitingTable()
    for number, (tenant, cached) in enumerate(requests):
        message = message_of(number, bytes(40), max_new=1)
        waiting.append(Request(message, max_len=11, seed=0, arrival_order=number, arrival_s=0.0))
        waiting.set_tag(number, tenant)
        waiting.set_cached_len(number, cached)
    return waiting


@pytest.mark.parametrize("seed", seeds(50, 200))
def test_fair_order_matches_reference(seed: int) -> None:
    rng = random.Random(f"walk {seed}")
    num_tenants = rng.randrange(2, 7)
    number = rng.randrange(1, 30)
    requests = [(rng.randrange(1, num_tenants), rng.choice([0, 0, 3, 5, 8])) for _ in range(number)]
    waiting = waiting_table([(tenant, 1) for tenant, _ in requests])
    lanes = TenantLanes(
        (LongestPrefix(World(settings()).scheduler.waiting_queue.online.policy.context),),
        set(range(number)),
    )
    lanes.update(waiting, num_tenants)
    for place, (_, cached) in enumerate(requests):
        waiting.set_cached_len(place, cached)
        if rng.random() < 0.3:
            lanes.update(waiting, num_tenants)
    lanes.update(waiting, num_tenants)
    served = [
        rng.choice([0.0, 1.0, 4_000.0, 4_096.0, 4_097.0, 9_000.0]) for _ in range(num_tenants)
    ]
    since_oldest = [rng.randrange(5) for _ in range(num_tenants)]
    num_overdue = rng.randrange(number + 1)
    end = rng.choice([EVERYBODY, rng.randrange(1, number + 1)])
    first = None
    if rng.random() < 0.3:
        first = rng.sample(range(number), rng.randrange(number + 1))

    def order_of(tenant: int) -> Iterator[Request]:
        for place in first or ():
            if place < end and requests[place][0] == tenant:
                yield waiting.request_at(place)

    begun = Walk(
        TenantsLeft(waiting, lanes, end=end, order_of=None if first is None else order_of),
        service=np.array(served),
        since_oldest=np.array(since_oldest),
        overdue_end=num_overdue,
        may_leave_due=first is None,
    )
    walk: NextTenant = begun
    num_short = rng.randrange(number + 1)
    plain = PlainWalk(requests[:end], num_overdue, first)
    num_named = 0
    while plain.left:
        if num_named == num_short:
            walk = LongWalk(begun)
        num_named += 1
        may_leave_due = rng.random() < 0.7
        found = walk.next(may_leave_due=may_leave_due)
        assert found == plain.next(served, since_oldest, may_leave_due=may_leave_due)
        assert found is not None
        place, turn = found
        service = rng.choice([None, 10.0, 10.0, 2_500.0, 5_000.0])
        walk.take(place, turn, service)
        tenant = plain.left.pop(place)[0]
        if service is None:
            continue
        served[tenant] += service
        since_oldest[tenant] = 0 if turn.is_oldest else since_oldest[tenant] + 1
    assert walk.next(may_leave_due=True) is None
