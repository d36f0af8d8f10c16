"""Policies of one's own: found by name, beside weft's, and harmless whatever they do."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.own_policies import FAULTY, ByTag
from tests.scheduler.policy_twins import order
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.config.plugins import load_object
from weft.engine.explain import get_queue_status
from weft.messages.control import SetPolicy
from weft.scheduler.policies.composed.build import why_not
from weft.scheduler.policies.user import load
from weft.scheduler.policies.user.guarded import GuardedPolicy, PolicyFailed

OWN = "tests.scheduler.own_policies:"


class Point:
    """An entry point of an installed package."""

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self._value = value

    def load(self) -> object:
        return load_object(self._value, "")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package has given its policies the names "latest" and "broken"."""
    points = [Point("latest", f"{OWN}Latest"), Point("broken", "no_such_package:Policy")]

    def entry_points(group: str, name: str = "") -> Any:
        assert group == "weft.policies"
        found = [point for point in points if name in ("", point.name)]

        class Found(list[Point]):
            @property
            def names(self) -> set[str]:
                return {point.name for point in self}

        return Found(found)

    monkeypatch.setattr(load, "entry_points", entry_points)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def waiting_world(policy: str, **changes: object) -> tuple[World, list[int]]:
    """One request runs, five wait."""
    world = World(settings(schedule_policy=policy, max_running_requests=1, **changes))
    world.send([1], max_new_tokens=9, ignore_eos=True)
    world.step()
    return world, [world.send([2] * n, max_new_tokens=1) for n in (5, 3, 8, 4, 6)]


def test_a_class_of_a_module_is_a_policy() -> None:
    world, ids = waiting_world(f"{OWN}Latest")
    assert order(world) == ids[::-1]
    world.run_dry()
    world.check_outputs()
    assert not world.scheduler.outbox.policy_fault


def test_a_policy_of_ones_own_stands_in_a_text_with_others() -> None:
    world, ids = waiting_world(f"priority > fair(key) > {OWN}Latest")
    assert order(world) == ids[::-1]
    world, ids = waiting_world(f"lof > {OWN}Latest")
    assert order(world) == ids[::-1]
    assert "no policy is allowed after it" in why_not(f"{OWN}ByTag > lpm")


def test_a_policy_with_an_account_hears_of_everything_and_has_a_number_for_each_request() -> None:
    world, ids = waiting_world(f"{OWN}ByTag")
    assert order(world) == [ids[1], ids[3], ids[0], ids[4], ids[2]]
    world.run_dry()
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, GuardedPolicy)
    own = policy._watch.own
    assert isinstance(own, ByTag)
    assert [own.heard.count(word) for word in ("arrived", "admitted", "left")] == [6, 6, 6]


@pytest.mark.usefixtures("installed")
def test_an_installed_package_gives_a_policy_a_name() -> None:
    world, ids = waiting_world("latest")
    assert order(world) == ids[::-1]
    assert why_not("priority > latest") == ""
    assert "latest" in why_not("ltest")
    assert "did you mean latest" in why_not("lates")
    assert "could not be loaded" in why_not("broken")
    assert "no_such_package" in why_not("broken")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Policy", "no_such_module"),
        (f"{OWN}Missing", "has no 'Missing'"),
        (f"{OWN}NoPolicy", "is not a subclass of weft.scheduler.policies.protocol.Policy"),
        (":", "could not be loaded"),
        ("magic", "module:Class for one of your own"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(name: str, words: str) -> None:
    assert words in why_not(name)
    assert words in why_not(f"priority > {name}")


@pytest.mark.parametrize("faulty", FAULTY)
def test_a_faulty_policy_ends_no_request_and_is_reported_once(faulty: str) -> None:
    world = EngineWorld(
        settings(schedule_policy=f"{OWN}{faulty}", max_running_requests=2, max_queued_requests=6)
    )
    reported: list[Exception] = []
    world.failed = reported.append  # type: ignore[method-assign]
    world.engine.services.core.guard._report = reported.append
    for number in range(14):
        world.send([number, 2], max_new_tokens=3)
        if number % 2:
            world.step()
    while world.has_work:
        world.step()
    assert len(world.finished) == 14
    assert {finish.status for finish in world.finished.values()} <= {200, 503}
    assert sum(finish.status == 200 for finish in world.finished.values()) >= 8
    assert len(reported) == 1
    assert faulty in str(reported[0])
    fault = world.scheduler.outbox.policy_fault
    assert "requests go in the order of arrival" in fault
    assert get_queue_status(world.scheduler).policy_fault == fault
    world.check_idle()


def test_after_a_fault_requests_go_as_they_came_until_a_policy_is_set() -> None:
    world, ids = waiting_world("fcfs")
    world.expected_failures = (PolicyFailed,)
    world.scheduler.set_policy(f"{OWN}RaisesLater")
    assert order(world) == [ids[-1], *ids[:-1]]
    assert order(world) == ids
    world.scheduler.set_policy("shortest-prefill-first")
    assert not world.scheduler.outbox.policy_fault
    assert order(world) == [ids[1], ids[3], ids[0], ids[4], ids[2]]


def test_a_control_message_sets_a_policy_of_ones_own() -> None:
    world = EngineWorld(settings())
    done: Any = world.tell(SetPolicy(call=1, policy=f"{OWN}Latest"))
    assert done.success
    refused: Any = world.tell(SetPolicy(call=2, policy=f"{OWN}Missing"))
    assert "has no 'Missing'" in refused.message


def test_a_journal_is_replayed_with_the_policy_of_ones_own_also_from_the_midst_of_work() -> None:
    few = settings(schedule_policy=f"fair(key) > {OWN}Latest", max_running_requests=2, num_pages=80)
    world = RecordedWorld(few)
    world.put_aside_in_every_step()
    for number in range(6):
        world.send([number, 1], max_new_tokens=2, tenant="ab"[number % 2])
    world.run_dry()
    world.replay(check=True)
    assert len(world.records.files) > 5


def test_no_installed_package_is_asked_for_a_policy_of_weft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(**arguments: object) -> object:
        raise AssertionError("packages are looked through")

    monkeypatch.setattr(importlib.metadata, "entry_points", never)
    monkeypatch.setattr(load, "entry_points", never)
    assert why_not("priority > fair(key) > lpm") == ""
    World(settings(schedule_policy="lpm"))
