"""Which models are in memory: single decisions, and random servers in virtual time."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.residency.world import World
from tests.seeds import slow
from weft.residency.residency import Residency
from weft.residency.resident import Level, Resident
from weft.residency.residents import Residents
from weft.residency.rules import Grow, Load, Refuse, Rules, Shrink, Unload

RULES = Rules(budget_bytes=100, patience_s=5.0, stay_loads=4.0, least_stay_s=2.0)


def model(name: str, fixed: int = 30, kv: int = 20, **facts: object) -> Resident:
    return Resident(name, fixed, kv, **facts)  # type: ignore[arg-type]


def ready(core: Residency, name: str, now_s: float) -> None:
    """Load a model through a request that ends at once."""
    core.facts.request(name, now_s)
    assert core.step(now_s) == [Load(name)]
    core.facts.loaded(name, now_s)
    assert core.facts.admit(name, now_s) == 1
    core.facts.end(name, now_s)


def core_with(*models: Resident, rules: Rules = RULES) -> Residency:
    facts = Residents(rules)
    for one in models:
        facts.add(one)
    return Residency(facts)


def test_the_first_request_loads_its_model() -> None:
    core = core_with(model("a"))
    assert not core.facts.request("a", 1.0)
    assert core.step(1.0) == [Load("a")]
    assert core.step(1.5) == []
    core.facts.loaded("a", 2.0)
    assert core.facts.admit("a", 2.0) == 1
    assert core.facts.request("a", 3.0), "the model is ready"


def test_kv_of_idle_models_gives_way_before_whole_models() -> None:
    core = core_with(model("a"), model("b"), model("c", 10, 10))
    ready(core, "a", 1.0)
    ready(core, "b", 2.0)
    core.facts.request("c", 3.0)
    assert core.step(3.0) == [Shrink("a")]
    core.facts.shrunk("a", 9.0)
    assert core.step(3.1) == [Load("c")]
    core.facts.loaded("c", 3.2)
    assert core.facts.admit("c", 3.2) == 1
    core.facts.end("c", 3.3)
    assert not core.facts.request("a", 4.0), "it has no KV"
    assert core.step(4.0) == [Shrink("b")]
    core.facts.shrunk("b", 9.0)
    assert core.step(4.1) == [Grow("a")]


def test_the_least_recently_used_model_is_unloaded() -> None:
    core = core_with(*(model(name, 50, 0) for name in "abc"))
    ready(core, "a", 1.0)
    ready(core, "b", 2.0)
    assert core.facts.request("a", 3.0)
    core.facts.end("a", 3.5)
    core.facts.request("c", 4.0)
    assert core.step(4.0) == [Unload("b", "room")]


def test_a_model_with_open_requests_or_a_pin_stays() -> None:
    core = core_with(model("a", 50, 0, pin=True), model("b", 50, 0), model("c", 50, 0))
    ready(core, "a", 1.0)
    ready(core, "b", 2.0)
    assert core.facts.request("b", 2.5)
    core.facts.request("c", 3.0)
    assert core.step(3.0) == []
    core.facts.end("b", 4.0)
    assert core.step(4.0) == [Unload("b", "room")]


def test_a_model_under_a_flood_makes_room_after_its_stay() -> None:
    core = core_with(model("a", 60, 0), model("b", 60, 0))
    ready(core, "a", 1.0)
    assert core.facts.request("a", 2.0)
    core.facts.request("b", 3.0)
    assert core.step(3.0) == []
    assert core.next_s(3.0) == 8.0, "the patience of b"
    assert core.step(8.0) == []
    assert not core.facts.request("a", 8.5), "new requests for a wait"
    core.facts.end("a", 9.0)
    assert core.step(9.0) == [Unload("a", "room")]
    core.facts.unloaded("a")
    assert core.step(9.5) == [Load("b")]


def test_a_request_that_gives_up_lets_the_other_model_go_on() -> None:
    core = core_with(model("a", 60, 0), model("b", 60, 0))
    ready(core, "a", 1.0)
    assert core.facts.request("a", 2.0)
    core.facts.request("b", 3.0)
    core.step(8.0)
    assert not core.facts.request("a", 8.5)
    core.facts.give_up("b", 3.0)
    assert core.step(9.0) == []
    assert core.facts.admit("a", 9.0) == 1


def test_a_model_that_never_fits_is_refused_with_the_reason() -> None:
    core = core_with(model("a", 90, 20), model("b", 60, 0, pin=True), model("c", 50, 0))
    core.facts.request("a", 1.0)
    [refusal] = core.step(1.0)
    assert isinstance(refusal, Refuse)
    assert "--memory is" in refusal.reason
    ready(core, "b", 2.0)
    core.facts.request("c", 3.0)
    [refusal] = core.step(3.0)
    assert isinstance(refusal, Refuse)
    assert "the pinned b" in refusal.reason


def test_an_idle_model_leaves_after_its_time() -> None:
    core = core_with(model("a", ttl_s=10.0), model("b", ttl_s=10.0, pin=True))
    ready(core, "a", 1.0)
    ready(core, "b", 1.0)
    assert core.next_s(2.0) == 11.0
    assert core.step(10.9) == []
    assert core.step(11.0) == [Unload("a", "idle")]


def test_a_model_unloads_when_asked_after_its_open_requests() -> None:
    core = core_with(model("a", pin=True))
    ready(core, "a", 1.0)
    assert core.facts.request("a", 2.0)
    core.facts.ask_unload("a")
    assert core.step(2.0) == []
    assert not core.facts.request("a", 2.5), "it waits for the next load"
    core.facts.end("a", 3.0)
    assert core.step(3.0) == [Unload("a", "asked")]
    core.facts.unloaded("a")
    assert core.step(4.0) == [Load("a")]


def test_who_asks_again_for_a_model_waits_since_the_first_time() -> None:
    core = core_with(model("a"), model("b"))
    ready(core, "b", 1.0)
    for now_s in (2.0, 3.0):
        core.facts.ask_load("a", now_s)
        core.facts.ask_load("b", now_s)
    assert core.facts.models["a"].asked_s == 2.0
    assert core.facts.models["b"].asked_s is None, "it is ready"


def test_two_models_in_the_room_of_one_do_not_spend_all_time_loading() -> None:
    """Each of two clients asks again as soon as it has its answer, of another model."""
    world = World(Rules(budget_bytes=100), longest_work_s=0.1, longest_load_s=2.0)
    for name in "ab":
        world.add(model(name, 60, 0), load_s=2.0)
    for number in range(2_000):
        name = "ab"[number % 2]
        world.at(number * 0.2, partial(world.request, name, 0.1))
    world.run()
    loads = sum(isinstance(action, Load) for _, action in world.actions)
    assert world.ended.served == 2_000
    assert loads * 2.0 <= world.now_s / 3


def test_position_and_time_are_told_to_those_who_wait() -> None:
    rules = Rules(budget_bytes=100, first_rate=10.0)
    core = core_with(model("a", 60, 0), model("b", 60, 0), model("c", 60, 0), rules=rules)
    for number, name in enumerate("abc"):
        core.facts.request(name, float(number))
    assert core.step(3.0) == [Load("a")]
    assert core.delay("a", 5.0) == (0, 4.0), "60 bytes, 10 a second, 2 seconds ago"
    assert core.delay("b", 5.0) == (0, 10.0)
    assert core.delay("c", 5.0) == (1, 16.0)
    core.facts.loaded("a", 6.0)
    assert core.facts.admit("a", 6.0) == 1
    assert core.delay("b", 6.0).eta_s == pytest.approx(60 / 15), "20 bytes a second were measured"


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    budget = rng.randint(60, 200)
    rules = Rules(
        budget,
        max_models=rng.choice((0, 0, 1, 2, 3)),
        patience_s=rng.choice((0.0, 1.0, 5.0)),
        stay_loads=rng.choice((0.0, 1.0, 4.0)),
        least_stay_s=rng.choice((0.0, 2.0)),
    )
    longest_load_s = rng.choice((0.2, 1.0, 4.0))
    longest_work_s = rng.choice((0.1, 1.0, 6.0))
    world = World(rules, longest_work_s, longest_load_s)
    names = "abcdefg"[: rng.randint(2, 7)]
    for name in names:
        one = model(name, rng.randint(5, 60), rng.randint(0, 40), can_shrink=rng.random() < 0.7)
        one.ttl_s = rng.choice((0.0, 0.0, 3.0, 20.0))
        one.pin = rng.random() < 0.1
        world.add(one, rng.uniform(0.1, 1.0) * longest_load_s)
        if rng.random() < 0.05:
            world.fails.add(name)
    flooded = rng.choice(names)
    num = rng.randint(20, 200)
    world.num_asked = num
    last_s = rng.uniform(1.0, 120.0)
    for _ in range(num):
        name = flooded if rng.random() < 0.5 else rng.choice(names)
        work_s = rng.uniform(0.0, longest_work_s)
        when_s = rng.uniform(0.0, last_s)
        world.at(when_s, partial(world.request, name, work_s))
    num_disturbances = rng.choice((0, 6))
    world.is_disturbed = num_disturbances > 0
    for _ in range(num_disturbances):
        what = rng.choice((world.kill, world.ask_unload, world.ask_load))
        name = rng.choice(names)
        world.at(rng.uniform(0.0, last_s), partial(what, name))
    return world


@pytest.mark.parametrize("first", [0, *slow([200, 400, 600])])
def test_random_servers_keep_every_rule(first: int) -> None:
    """Budget, pins, open requests and the bound of a wait are checked after each event."""
    for seed in range(first, first + 200):
        world = random_world(seed)
        world.run()
        ended = world.ended
        total = ended.served + ended.refused + ended.lost
        assert total == world.num_asked, seed
        assert all(one.level is not Level.LOADING for one in world.facts.models.values())
