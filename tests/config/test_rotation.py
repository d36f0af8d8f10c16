"""Turns among tenants."""

from __future__ import annotations

import random

import pytest

from weft.config.rotation import Rotation


def filled(*items: tuple[str, str, bool]) -> Rotation[str]:
    rotation = Rotation[str]()
    for tenant, item, is_long in items:
        rotation.put(tenant, item, is_long=is_long)
    return rotation


def drained(rotation: Rotation[str], *, with_long: bool = True) -> list[str]:
    found = []
    while (item := rotation.take(with_long=with_long)) is not None:
        found.append(item)
    return found


def test_tenants_take_turns_however_much_one_of_them_has() -> None:
    rotation = filled(
        *[("a", f"a{place}", False) for place in range(4)], ("b", "b0", False), ("c", "c0", False)
    )
    assert drained(rotation) == ["a0", "b0", "c0", "a1", "a2", "a3"]
    assert len(rotation) == 0


def test_long_work_is_passed_over_and_keeps_its_place() -> None:
    rotation = filled(("a", "long", True), ("a", "short", False), ("b", "longer", True))
    assert drained(rotation, with_long=False) == ["short"]
    assert drained(rotation) == ["longer", "long"]  # a has had its turn


def test_what_is_removed_is_not_taken() -> None:
    rotation = filled(("a", "a0", False), ("a", "a1", False))
    assert rotation.remove("a", "a0")
    assert not rotation.remove("a", "a0")
    assert not rotation.remove("b", "a1")
    assert drained(rotation) == ["a1"]


@pytest.mark.parametrize("seed", range(20))
def test_no_tenant_is_served_twice_while_another_one_waits(seed: int) -> None:
    rng = random.Random(seed)
    rotation = Rotation[tuple[str, int]]()
    waiting: dict[str, list[int]] = {}
    served_since: dict[str, set[str]] = {}  # by tenant that waits: who was served meanwhile
    for number in range(300):
        if rng.random() < 0.55:
            tenant = rng.choice("abcde")
            rotation.put(tenant, (tenant, number), is_long=False)
            waiting.setdefault(tenant, []).append(number)
            served_since.setdefault(tenant, set())
        elif (item := rotation.take(with_long=True)) is not None:
            tenant, place = item
            assert waiting[tenant].pop(0) == place
            served_since.pop(tenant)
            for others in served_since.values():
                assert tenant not in others
                others.add(tenant)
            if waiting[tenant]:
                served_since[tenant] = set()
    assert len(rotation) == sum(map(len, waiting.values()))
