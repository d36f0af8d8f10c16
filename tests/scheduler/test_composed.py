"""Policies made of several: the text, the order against a plain sort, and the bounds of
docs/guides/policies.md."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.scheduler.crowd import Crowd, begun, given, served_settings
from tests.scheduler.policy_twins import TWINS, busy_world, order
from tests.scheduler.random_worlds import COMPOSED, run_random
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from tests.seeds import seeds
from weft.cli.main import main
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError, options_of
from weft.messages.requests import Abort
from weft.scheduler import policies
from weft.scheduler.policies import UnknownPolicy
from weft.scheduler.policies.composed.build import why_not
from weft.scheduler.policies.composed.classes import Classes
from weft.scheduler.policies.composed.language import PolicyText, parse
from weft.scheduler.policies.kinds.fair import Fair
from weft.scheduler.policies.protocol import TURNS
from weft.scheduler.request import Request

ROWS = 12

# The text


def test_a_text_is_read_with_and_without_spaces() -> None:
    expected = PolicyText(True, True, ("lof", "lpm"))
    assert parse("priority>fair(key)>lof>lpm") == expected
    assert parse(" priority > fair( key ) > lof > lpm ") == expected
    assert parse("fair") == parse("fair(key)") == PolicyText(False, True, ())


@pytest.mark.parametrize(
    ("text", "word", "allowed"),
    [
        ("magic", "'magic'", "dfs-weight, fair, fcfs"),
        ("priority > lmp", "'lmp'", "did you mean lpm"),
        ("priority >", "a policy is missing beside '>'", "fcfs, hrrn"),
        ("lpm > priority", "'priority' makes classes", "as the first word"),
        ("lpm > fair(key)", "'fair' makes tenants", "or directly after 'priority'"),
        ("fair(user) > lpm", "'user'", "'key' is allowed"),
        ("fair( > lpm", "'fair('", "one ')'"),
        ("fair(key > lpm", "'fair(key'", "one ')'"),
        ("lpm(key)", "'lpm' takes no brackets", "fair(key) does"),
        ("priority > static", "'static'", "cannot be combined"),
        ("lpm > lof > lpm", "'lpm' is given twice", "once is allowed"),
        ("fcfs > lpm", "'fcfs' gives all requests an order", "no policy is allowed after it"),
        ("priority > dfs-weight > lof", "'dfs-weight' gives", "after it"),
    ],
)
def test_a_wrong_text_is_refused_with_the_word_and_what_is_allowed(
    text: str, word: str, allowed: str
) -> None:
    if word != repr(text):  # a fault does not repeat the whole text
        assert word in why_not(text)
    assert repr(text) not in why_not(text)
    assert allowed in why_not(text)
    (option,) = [one for one in options_of(EngineConfig) if one.name == "schedule_policy"]
    with pytest.raises(SettingsError) as caught:
        option.checked(text, "--schedule-policy")
    assert word in str(caught.value)
    world = World(settings())
    with pytest.raises(UnknownPolicy):
        world.scheduler.set_policy(text)
    assert world.scheduler.settings.schedule_policy == "fcfs"


def test_old_names_make_the_policies_that_they_made() -> None:
    for name in policies.names():
        assert why_not(name) == ""
        policy = World(settings(schedule_policy=name)).scheduler.waiting_queue.online.policy
        assert type(policy).__module__.startswith("weft.scheduler.policies.")
    same = World(settings(schedule_policy="fair(key) > lpm")).scheduler.waiting_queue.online.policy
    assert type(same) is Fair


# The order


def composed_key(text: str, world: World, request: Request) -> tuple[float, ...]:
    names = text.split(" > ")
    return (*(TWINS[name](world, request) for name in names), request.spec.arrival_order)


@pytest.mark.parametrize(
    "text",
    [
        "priority > lpm",
        "priority > shortest-prefill-first",
        "lof > lpm",
        "priority > lof > shortest-prefill-first",
        "lpm > lof > hrrn",
    ],
)
def test_the_order_is_that_of_a_sort_by_one_policy_after_the_other(text: str) -> None:
    world = busy_world(text, 3, num_waiting=320)
    for _ in range(4):
        world.step()
        fresh = [one for one in world.scheduler.waiting_queue if not one.retractions]
        expected = sorted(fresh, key=lambda one: composed_key(text, world, one))
        ids = {one.id for one in fresh}
        assert len(ids) > 150
        assert [id for id in order(world) if id in ids] == [one.id for one in expected]


@pytest.mark.parametrize("text", [*COMPOSED, "fair(key) > deadline", "priority > deadline"])
def test_every_composed_policy_names_each_waiting_request_once(text: str) -> None:
    for aging_s in (0.0, 30.0):
        world = busy_world(text, num_waiting=120, aging_s=aging_s)
        waiting = [request.id for request in world.scheduler.waiting_queue]
        assert sorted(order(world)) == sorted(waiting)
        assert len(waiting) > 50


def test_very_many_classes_go_in_their_order() -> None:
    world = World(settings(schedule_policy="priority > lof", max_running_requests=1))
    world.send([1], max_new_tokens=20, ignore_eos=True)
    world.step()
    ids = {world.send([2], max_new_tokens=1, priority=-number): number for number in range(60)}
    assert order(world) == sorted(ids, key=lambda id: ids[id])


def test_within_a_tenant_its_own_policy_decides_and_between_tenants_the_account() -> None:
    world = World(
        settings(
            schedule_policy="fair(key) > shortest-prefill-first",
            max_running_requests=1,
            prefix_cache=False,
        )
    )
    world.send([1], max_new_tokens=9, ignore_eos=True, tenant="other")
    world.step()
    long = world.send([2] * 30, max_new_tokens=1, tenant="a")
    short = world.send([2] * 5, max_new_tokens=1, tenant="a")
    mine = [world.send([3] * length, max_new_tokens=1, tenant="b") for length in (12, 8, 10)]
    # a: 5, b: 8, then a has 5 and b has 8: a's 30, and b alone is left.
    assert order(world) == [short, mine[1], long, mine[2], mine[0]]
    world.run_dry()
    world.check_outputs()


# Bounds


@pytest.mark.parametrize("inside", ["fcfs", "lof > lpm"])
def test_with_an_order_within_tenants_two_of_them_differ_by_no_more_than_vtcs_bound(
    inside: str,
) -> None:
    """As in test_fair.py, but no cached prefix may put a tenant ahead: 2 * (L + 2 * G) is the
    bound."""
    max_new = 24
    tenants = [f"t{place}" for place in range(10)]
    world = World(served_settings(schedule_policy=f"fair(key) > {inside}"), depth=1)
    lengths = dict.fromkeys(tenants, 300) | {"t0": 1_500}
    bound = 2 * (1_500 + 2 * ROWS * max_new)
    depths = dict.fromkeys(tenants, 3)
    crowd = Crowd(world, lengths, depths | {"t0": 1_000}, max_new=max_new)
    crowd.fill_up()
    crowd.depths = depths
    seen = [dict.fromkeys(tenants, 0)]
    for number in range(1, 241):
        crowd.fill_up()
        world.step(check=False)
        if number % 60 == 0:
            seen.append({tenant: given(world, tenant) for tenant in tenants})
    assert min(seen[-1].values()) > 1_000
    for place, later in enumerate(seen):
        for before in seen[:place]:
            grown = [later[tenant] - before[tenant] for tenant in tenants]
            assert max(grown) - min(grown) <= bound


def given_in_class(world: World, tenant: str, priority: int) -> int:
    total = 0
    for id, request in world.sent.items():
        if request.tenant != tenant or request.priority != priority:
            continue
        cached = begun(world.scheduler, world, id)
        if cached is not None:
            total += len(world.prompts[id]) - cached + 2 * len(world.outputs[id])
    return total


def test_what_a_tenant_gets_in_a_higher_class_is_not_taken_from_it_in_a_lower_one() -> None:
    """The bound holds for each class by itself."""
    world = World(
        settings(
            schedule_policy="priority > fair(key) > fcfs",
            max_running_requests=4,
            prefix_cache=False,
            preemption_threshold=100,
        )
    )
    for _ in range(40):
        world.send([1, 2], max_new_tokens=10, ignore_eos=True, tenant="a", priority=1)
    for tenant in ("a", "b"):
        for _ in range(150):
            world.send([1, 2], max_new_tokens=10, ignore_eos=True, tenant=tenant)
    for _ in range(400):
        world.step(check=False)
    assert given_in_class(world, "a", 1) == 40 * (2 + 2 * 10)
    differs = given_in_class(world, "a", 0) - given_in_class(world, "b", 0)
    assert abs(differs) <= 2 * (2 + 2 * 4 * 10)
    waiting = Counter(one.message.tenant for one in world.scheduler.waiting_queue)
    assert waiting["a"] > 10
    assert waiting["b"] > 10


@pytest.mark.parametrize("text", ["priority > fair(key) > lpm", "priority > fair(key)"])
def test_a_class_with_an_overdue_request_has_every_fourth_turn_and_fairness_says_whose(
    text: str,
) -> None:
    world = World(
        settings(
            schedule_policy=text, max_running_requests=1, aging_s=20.0, preemption_threshold=1_000
        )
    )
    low = []
    for number in range(12):
        tenant = "flood" if number < 11 else "single"
        low.append(world.send([5, number], max_new_tokens=1, tenant=tenant))
    world.time += 30.0
    admitted: list[int] = []
    for number in range(200):
        while len(world.scheduler.waiting_queue) < 20 and len(admitted) < 60:
            world.send(
                [7, number % VOCAB],
                max_new_tokens=1,
                tenant=f"t{len(world.sent) % 3}",
                priority=5,
            )
        world.step(check=False)
        admitted += [id for id in world.finished if id not in admitted]
        if len(admitted) > 60:
            break
    places = [place for place, id in enumerate(admitted) if id in low]
    assert len(places) == len(low)
    gaps = [after - before for before, after in zip([-1, *places], places, strict=False)]
    assert max(gaps) <= TURNS
    # Of the class's first two turns one is the single tenant's, though the flood came before it.
    assert low[-1] in [admitted[place] for place in places[:2]]


def test_a_flood_of_names_gains_nothing_because_a_name_of_the_client_is_no_tenant() -> None:
    """`user` is what a client says; `tenant` is the key, which the server says."""
    world = World(
        settings(schedule_policy="fair(key) > fcfs", max_running_requests=4, prefix_cache=False)
    )
    for number in range(300):
        world.send([1], max_new_tokens=8, ignore_eos=True, user=f"u{number}", tenant="inventor")
        world.send([1], max_new_tokens=8, ignore_eos=True, user="me", tenant="honest")
    for _ in range(250):
        world.step(check=False)
    differs = given(world, "inventor") - given(world, "honest")
    assert abs(differs) <= 2 * (1 + 2 * 4 * 8)


def test_a_class_is_forgotten_when_its_last_request_has_gone() -> None:
    world = World(settings(schedule_policy="priority > fair(key)", max_running_requests=2))
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, Classes)
    for number in range(60):
        world.send([1], max_new_tokens=2, priority=number, tenant=f"t{number}")
        if number % 3 == 0:
            world.abort(Abort(ids=(number,)))
    world.run_dry(check=False)
    assert not policy._policies
    assert not policy._open


def test_when_the_queue_is_full_lower_classes_go_first_and_then_the_tenant_with_most() -> None:
    world = World(
        settings(
            schedule_policy="priority > fair(key)", max_running_requests=1, max_queued_requests=6
        )
    )
    world.send([1], max_new_tokens=30, ignore_eos=True, priority=3)
    world.step()
    low = [world.send([2], max_new_tokens=1, tenant="low") for _ in range(2)]
    many = [world.send([3], max_new_tokens=1, tenant="many", priority=1) for _ in range(4)]
    few = [world.send([4], max_new_tokens=1, tenant="few", priority=1) for _ in range(4)]
    waiting = {request.id for request in world.scheduler.waiting_queue}
    assert waiting == {*many[:3], *few[:3]}
    assert not waiting & set(low)


# Everything together


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_schedules_of_composed_policies_keep_every_invariant_and_are_replayed(
    seed: int,
) -> None:
    world = run_random(7_000 + seed, 25, composed=True, switches=seed % 4 == 0)
    if seed % 4 == 1:
        world.replay(check=True)


def test_a_journal_may_begin_in_the_midst_of_work_under_composed_policies() -> None:
    """What classes and tenants have got is part of the state with which each file begins."""
    few = settings(
        schedule_policy="priority > fair(key) > lof > lpm", max_running_requests=2, num_pages=80
    )
    world = RecordedWorld(few)
    world.put_aside_in_every_step()
    for number in range(6):
        tenant = "ab"[number % 2]
        world.send([number, 1], max_new_tokens=2, tenant=tenant, priority=number % 3)
    world.run_dry()
    world.replay(check=True)
    assert len(world.records.files) > 5


def test_the_simulator_compares_composed_policies(capsys: pytest.CaptureFixture[str]) -> None:
    compare = "policy=fcfs,priority>fair(key)>lpm"
    assert main(["sim", "--requests", "60", "--tenants", "3", "--compare", compare]) == 0
    assert "policy=priority>fair(key)>lpm" in capsys.readouterr().out
