"""What is written to a store before it would be evicted, and when anybody looks for it."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.engine.tiers.writes import LOOK_EVERY_S, LOW_PART, MAX_OLDEST, TierWrites

NUM_PAGES = 40 * LOW_PART
SEQUENCES = [f"sequence {number}" for number in range(MAX_OLDEST + 4)]  # the latest first


class World:
    """Writes of sequences that are only names."""

    def __init__(self) -> None:
        self.sequences = list(SEQUENCES)
        self.worthy: OrderedDict[str, None] = OrderedDict()
        self.feature = SimpleNamespace(worthy=self.worthy, is_worthy_now=self._note)
        self.allocator = SimpleNamespace(num_pages=NUM_PAGES, num_free=0)
        tree = SimpleNamespace(sequences=lambda: list(self.sequences))
        kv = SimpleNamespace(allocator=self.allocator, cache=SimpleNamespace(tree=tree))
        self.table = SimpleNamespace(writing=None)
        self.store = SimpleNamespace(
            settings=None,
            tiers=None,
            is_open=True,
            transfers=SimpleNamespace(table=self.table),
        )
        core = SimpleNamespace(scheduler=SimpleNamespace(kv=kv))
        self.writes = TierWrites(*cast("tuple[Any, Any, Any]", (core, self.feature, self.store)))

    def _note(self, key: str) -> None:
        self.worthy[key] = None
        self.worthy.move_to_end(key, last=False)

    def look(self, now: float) -> list[str]:
        """What is found, in the order in which it is written; then all of it has been written."""
        self.writes.save_oldest(now)
        found = list(self.worthy)
        self.worthy.clear()
        return found


def test_who_is_evicted_next_is_written_first() -> None:
    found = World().look(0.0)
    assert found == SEQUENCES[::-1][:MAX_OLDEST]


def test_nobody_looks_again_before_a_while_has_passed() -> None:
    world = World()
    assert world.writes.next_look_s == -math.inf
    assert world.look(7.0)
    assert world.writes.next_look_s == 7.0 + LOOK_EVERY_S
    world.sequences.append("new")
    assert world.look(world.writes.next_look_s - 1e-6) == []
    assert world.look(world.writes.next_look_s) == ["new"]


def test_what_was_there_at_the_last_look_is_not_written_again() -> None:
    world = World()
    world.look(0.0)
    assert world.look(1.0) == []
    away = world.sequences.pop()
    assert world.look(2.0) == [SEQUENCES[-MAX_OLDEST - 1]]  # it has come among the oldest
    world.sequences.append(away)
    assert world.look(3.0) == [away]  # another one since: it may have been driven out


@pytest.mark.parametrize(
    ("change", "finds"),
    [
        (lambda world: None, True),
        (lambda world: world.worthy.update(other=None), False),
        (lambda world: setattr(world.table, "writing", 3), False),
        (lambda world: setattr(world.store, "is_open", False), False),
        (lambda world: setattr(world.allocator, "num_free", NUM_PAGES // LOW_PART), True),
        (lambda world: setattr(world.allocator, "num_free", NUM_PAGES // LOW_PART + 1), False),
    ],
    ids=["as it is", "others wait", "one is written", "shut", "a fourth is free", "more is free"],
)
def test_it_looks_only_if_memory_is_short_and_nothing_else_is_to_be_written(
    change: Any, finds: bool
) -> None:
    world = World()
    change(world)
    before = set(world.worthy)
    found = set(world.look(5.0)) - before
    assert bool(found) == finds
    assert (world.writes.next_look_s > 5.0) == finds
