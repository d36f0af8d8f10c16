"""Each policy's order against its plain twin, and what no policy may do: starve somebody."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.policy_twins import TWINS, busy_world, order
from tests.scheduler.random_worlds import run_random
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import seeds
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError, options_of
from weft.config.pairs import parse_tenant_weights
from weft.engine.control.handlers import HANDLERS
from weft.messages.control import SetPolicy, SetPolicyReply
from weft.scheduler import policies
from weft.scheduler.policies import UnknownPolicy
from weft.scheduler.policies.protocol import TURNS
from weft.scheduler.request import RequestState


@pytest.mark.parametrize("policy", list(TWINS))
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_the_order_is_that_of_a_sort_which_looks_every_prefix_up(policy: str, seed: int) -> None:
    world = busy_world(policy, seed)
    for _ in range(10):
        world.step()
        fresh = [request for request in world.scheduler.waiting_queue if not request.retractions]
        by_twin = sorted(
            fresh, key=lambda request: (TWINS[policy](world, request), request.spec.arrival_order)
        )
        assert len(by_twin) > 100
        ids = {request.id for request in fresh}
        assert [id for id in order(world) if id in ids] == [request.id for request in by_twin]


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_looks_at_each_waiting_request_once(policy: str) -> None:
    world = busy_world(policy, aging_s=30.0)
    while policy == "static" and not order(world):
        world.step()
    waiting = [request.id for request in world.scheduler.waiting_queue]
    assert sorted(order(world)) == sorted(waiting)
    assert len(waiting) > 50


def test_the_heaviest_branch_of_the_tree_goes_first_and_stays_together() -> None:
    world = World(settings(schedule_policy="dfs-weight", max_running_requests=1, page_size=1))
    stems = [[10 + i] * 20 for i in range(3)]
    for stem in stems:
        world.send(stem, max_new_tokens=1)
    world.run_dry()
    ids = {i: [] for i in range(3)}
    for number, i in enumerate([0, 1, 2, 1, 2, 2, 0, 2]):
        ids[i].append(world.send([*stems[i], 100 + number], max_new_tokens=1))
    cold = world.send([200, 201], max_new_tokens=1)
    assert order(world)[:4] == ids[2]
    assert sorted(order(world)[4:8]) == sorted(ids[0] + ids[1])
    assert order(world)[-1] == cold


def test_the_random_order_depends_on_the_seed_alone() -> None:
    orders = []
    for seed in (3, 3, 4):
        world = World(settings(schedule_policy="random", seed=seed))
        for number in range(50):
            world.send([number], max_new_tokens=1)
        orders.append(order(world))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_a_static_batch_waits_for_its_slowest_request() -> None:
    world = World(settings(schedule_policy="static", max_running_requests=3))
    batch = [
        world.send([i, 1], max_new_tokens=n, ignore_eos=True) for i, n in enumerate([2, 4, 12])
    ]
    world.step()
    late = world.send([9, 9], max_new_tokens=2, ignore_eos=True)
    while batch[2] not in world.finished:
        assert world.request(late).state is RequestState.WAITING
        world.step()
    world.run_dry()
    assert world.finished[late].reason == "length"
    world.check_outputs()


# Nobody is starved


def crowd(world: World, hot: list[int], number: int) -> int:
    """A request that every policy but the fair ones prefers to `lonely`; the tenant of both is the
    same."""
    tail = [number % VOCAB, number // VOCAB]
    return world.send([*hot, *tail], max_new_tokens=6, ignore_eos=True, priority=30)


def lonely(world: World) -> int:
    return world.send([5] * 40, max_new_tokens=1, ignore_eos=True)


@pytest.mark.parametrize(
    "policy", ["lpm", "dfs-weight", "shortest-prefill-first", "lof", "priority"]
)
def test_without_aging_endless_competition_starves(policy: str) -> None:
    world = World(settings(schedule_policy=policy, max_running_requests=2))
    hot = list(range(100, 120))
    world.send(hot, max_new_tokens=1)
    world.run_dry()
    for number in range(4):
        crowd(world, hot, number)
    victim = lonely(world)
    for number in range(4, 200):
        while len(world.scheduler.waiting_queue) < 5:
            crowd(world, hot, number)
        world.step(check=False)
    assert world.request(victim).admitted_s < 0


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_an_overdue_request_is_admitted_after_at_most_four_times_as_many_as_are_older(
    policy: str, seed: int
) -> None:
    """The bound of every policy: 4 · (older ones that wait + 1) admissions from the moment at which
    it is overdue."""
    rng = random.Random(seed)
    world = World(
        settings(
            schedule_policy=policy, max_running_requests=2, aging_s=25.0, preemption_threshold=5
        )
    )
    hot = list(range(100, 120))
    passed: dict[int, int] = {}  # admissions since it was overdue
    bound: dict[int, int] = {}
    admitted: set[int] = set()
    for number in range(250):
        while len(world.scheduler.waiting_queue) < 8:
            crowd(world, hot, number)
        if rng.random() < 0.02 and len(world.scheduler.waiting_queue) < 14:
            lonely(world)
        waiting = {r.id: r for r in world.scheduler.waiting_queue if r.admitted_s < 0}
        for id, request in waiting.items():
            if id not in bound and world.time + 1 - request.spec.arrival_s >= 25.0:
                older = sum(
                    other.spec.arrival_order < request.spec.arrival_order
                    for other in world.scheduler.waiting_queue
                )
                bound[id], passed[id] = TURNS * (older + 1), 0
        world.step(check=False)
        now_admitted = {
            id for id in waiting if id in world.finished or world.request(id).admitted_s >= 0
        }
        for id in bound:
            if id in waiting and id not in admitted:
                passed[id] += len(now_admitted - {id})
                assert passed[id] <= bound[id]
        admitted |= now_admitted
    assert len(admitted) > 25
    assert any(id in admitted for id in bound) or policy in (
        "fcfs",
        "static",
        "fair",
        "hrrn",
        "random",
    )
    world.run_dry(check=False)
    world.check_idle()
    world.check_outputs()


# Priority


def test_a_higher_class_goes_first_and_a_lower_one_if_it_is_to() -> None:
    for low_first in (False, True):
        world = World(
            settings(
                schedule_policy="priority", max_running_requests=1, low_priority_first=low_first
            )
        )
        world.send([1], max_new_tokens=3, ignore_eos=True, priority=2)
        world.step()
        ids = [
            world.send([2 + i], max_new_tokens=1, priority=p) for i, p in enumerate([1, 3, 2, 3])
        ]
        expected = (
            [ids[0], ids[2], ids[1], ids[3]] if low_first else [ids[1], ids[3], ids[2], ids[0]]
        )
        assert order(world) == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_a_far_higher_priority_takes_the_place_of_a_running_request_that_goes_on_later(
    depth: int,
) -> None:
    world = World(
        settings(schedule_policy="priority", max_running_requests=2, preemption_threshold=10),
        depth=depth,
    )
    low = [
        world.send([i, i], max_new_tokens=40, ignore_eos=True, priority=p)
        for i, p in enumerate([0, 5])
    ]
    for _ in range(10):
        world.step()
    near = world.send([20], max_new_tokens=2, ignore_eos=True, priority=10)
    for _ in range(3):
        world.step()
    assert near not in world.finished
    high = world.send([30], max_new_tokens=2, ignore_eos=True, priority=11)
    for _ in range(6):
        world.step()
    assert high in world.finished
    world.run_dry()
    assert [world.finished[id].retractions for id in low] == [1, 0]
    assert world.scheduler.counters.num_retractions == 1
    prefilled = world.scheduler.counters.num_prefilled_tokens - sum(
        finish.prompt_tokens - finish.cached_tokens for finish in world.finished.values()
    )
    assert prefilled <= 2  # what the preempted one had computed was still in the cache
    world.check_idle()
    world.check_outputs()


def test_nobody_is_preempted_in_vain() -> None:
    world = World(
        settings(
            schedule_policy="priority", num_pages=100, context_length=100, preemption_threshold=0
        )
    )
    world.send([1], max_new_tokens=60, ignore_eos=True, priority=9)
    low = world.send([2], max_new_tokens=25, ignore_eos=True, priority=0)
    world.step()
    world.step()
    world.send(
        [3] * 60, max_new_tokens=30, ignore_eos=True, priority=5
    )  # more than the low one holds
    for _ in range(5):
        world.step()
    assert world.request(low).row >= 0
    world.run_dry()
    assert not world.scheduler.counters.num_retractions
    world.check_outputs()


def test_room_for_a_request_is_not_made_of_its_own_prefix() -> None:
    world = World(
        settings(
            schedule_policy="priority", num_pages=100, context_length=100, preemption_threshold=0
        )
    )
    world.send([3] * 40, max_new_tokens=1, ignore_eos=True)
    world.run_dry()
    low = world.send([2], max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        world.step()
    high = world.send([3] * 40 + [4] * 40, max_new_tokens=2, ignore_eos=True, priority=5)
    while high not in world.finished:
        world.step()
    assert low not in world.finished
    world.run_dry()
    assert world.finished[low].retractions == 1
    assert world.finished[high].cached_tokens == 40
    world.check_outputs()


def test_a_long_prompt_of_a_low_class_does_not_hold_the_steps_of_a_high_one() -> None:
    world = World(
        settings(schedule_policy="priority", chunked_prefill_size=8, preemption_threshold=10)
    )
    low = world.send([1] * 120, max_new_tokens=3, ignore_eos=True)
    world.step()
    world.step()
    high = world.send([2, 3], max_new_tokens=2, ignore_eos=True, priority=50)
    world.step()
    assert len(world.outputs[high]) == 1
    world.run_dry()
    assert world.finished[low].retractions == 1
    world.check_outputs()


# Weights of tenants (what `fair` makes of them is in test_fair.py)


def test_weights_of_tenants_are_read_and_mistakes_are_named() -> None:
    assert parse_tenant_weights(" alice=2, bob = 0.5,", "--tenant-weights") == (
        ("alice", 2.0),
        ("bob", 0.5),
    )
    assert parse_tenant_weights("", "--tenant-weights") == ()
    for bad in ("alice", "alice=", "=2", "alice=-1", "alice=inf"):
        with pytest.raises(SettingsError, match="--tenant-weights"):
            parse_tenant_weights(bad, "--tenant-weights")


# Choosing and switching


def test_policies_are_sorted_and_each_module_of_the_folder_is_one() -> None:
    folder = Path(policies.__file__).parent / "kinds"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert policies.names() == tuple(sorted(name.replace("_", "-") for name in modules))
    for name in policies.names():
        policy = World(settings(schedule_policy=name)).scheduler.waiting_queue.online.policy
        assert type(policy).__module__ == f"weft.scheduler.policies.kinds.{name.replace('-', '_')}"


def test_listing_the_policies_imports_none() -> None:
    code = (
        "import sys\n"
        "from weft.scheduler.policies import names\n"
        "assert 'fair' in names()\n"
        "print(*(name for name in sys.modules if name in ('numpy', 'weft.scheduler.policies.protocol')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_command_line_offers_every_policy() -> None:
    (option,) = [option for option in options_of(EngineConfig) if option.name == "schedule_policy"]
    assert option.choices == policies.names()


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    world = World(settings())
    with pytest.raises(UnknownPolicy, match=r"'magic'.*dfs-weight, fair, fcfs, hrrn"):
        world.scheduler.set_policy("magic")
    assert world.scheduler.settings.schedule_policy == "fcfs"


def test_a_control_message_switches_the_policy_of_those_that_wait() -> None:
    world = World(settings(max_running_requests=1))
    world.send([1], max_new_tokens=9, ignore_eos=True)
    world.step()
    ids = [world.send([2] * n, max_new_tokens=1) for n in (5, 3, 4)]
    assert order(world) == ids

    class Engine:
        scheduler = world.scheduler

    reply = HANDLERS[SetPolicy](Engine(), SetPolicy(call=1, policy="shortest-prefill-first"))  # type: ignore[arg-type]
    assert reply == SetPolicyReply(success=True, before="fcfs")
    assert order(world) == [ids[1], ids[2], ids[0]]
    bad = HANDLERS[SetPolicy](Engine(), SetPolicy(call=2, policy="magic"))  # type: ignore[arg-type]
    assert isinstance(bad, SetPolicyReply)
    assert not bad.success
    assert "hrrn" in bad.message
    world.run_dry()
    world.check_outputs()


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_switching_all_the_time_breaks_nothing(seed: int) -> None:
    run_random(2_000 + seed, switches=True)


def test_a_request_passes_some_that_wait_for_a_prefix_but_not_very_many() -> None:
    for num_alike, is_admitted in [(1 + 63, True), (1 + 64, False)]:
        world = World(settings(chunked_prefill_size=-1, max_running_requests=100, num_pages=9_000))
        prefix = list(range(60))
        for number in range(num_alike):
            world.send([*prefix, number], max_new_tokens=2, ignore_eos=True)
        last = world.send([200, 201], max_new_tokens=2, ignore_eos=True)
        world.step()
        assert bool(world.outputs[last]) == is_admitted
        assert sum(map(bool, world.outputs.values())) == 1 + is_admitted
        world.run_dry()
        world.check_outputs()
