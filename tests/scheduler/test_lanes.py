"""Waiting requests that are kept in order, against a sort of all of them."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.arrays import LongArray
from weft.bench.overhead import message_of
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.pace.pace import Pace
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.kinds.lpm import LongestPrefix
from weft.scheduler.policies.lanes.lane import BLOCK_SIZE, Entry, Lane
from weft.scheduler.policies.lanes.lanes import ONLY_LANE, Lanes, requests_of
from weft.scheduler.policies.protocol import PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, WaitingTable

KEPT = (
    "lpm",
    "lof",
    "random",
    "priority",
    "shortest-prefill-first",
    "hrrn",
    "deadline",
    "lof > lpm",
    "lpm > lof > shortest-prefill-first",
)


def context(token_s: float = 0.0) -> PolicyContext:
    """Prompts take `token_s` seconds a token."""
    known = World(settings(seed=5)).scheduler.waiting_queue.online.policy.context
    pace = SimpleNamespace(model=lambda: SimpleNamespace(token_s=token_s))
    return known._replace(pace=cast(Pace, pace))


class Crowd:
    """A table of waiting requests, of which some come, leave or find more in the cache."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.table = WaitingTable()
        self.time = 0.0
        self.number = 0

    def come(self) -> None:
        rng = self.rng
        prompt_len = rng.randrange(2, 30)
        message = GenerateRequest(
            id=self.number,
            rid=f"r{self.number}",
            input_ids=bytes(4 * prompt_len),
            sampling=SamplingParams(),
            priority=rng.randrange(-2, 3),
            ttft_ms=rng.choice([0, 500, 2_000, 9_000]),
            timeout_ms=rng.choice([0, 0, 4_000]),
        )
        max_len = prompt_len + rng.randrange(1, 9)
        self.time += rng.choice([0.0, 0.01, 0.1])
        self.table.append(
            Request(
                message, max_len=max_len, seed=0, arrival_order=self.number, arrival_s=self.time
            )
        )
        self.number += 1

    def change(self) -> None:
        rng = self.rng
        waiting = list(self.table)
        if waiting and rng.random() < 0.5:
            self.table.discard(rng.choice(waiting))
        elif waiting:
            request = rng.choice(waiting)
            length = rng.randrange(request.fill_len)
            if request in self.table:
                self.table.set_cached_len(request.spec.arrival_order, length)


def ids(requests: Iterator[Request]) -> list[int]:
    return [request.id for request in requests]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("text", KEPT)
def test_the_order_that_is_kept_matches_a_sort(text: str, seed: int) -> None:
    rng = random.Random(f"kept {seed}")
    crowd = Crowd(rng)
    policy = build_policy(text, context(rng.choice([0.0, 0.05, 0.5])))
    for _ in range(40):
        for _ in range(rng.choice([0, 1, 5, 60])):
            crowd.come()
        for _ in range(rng.choice([0, 1, 9, 50])):
            crowd.change()
        if rng.random() < 0.3:
            policy.look(crowd.table)
        end = rng.choice([EVERYBODY, EVERYBODY, rng.randrange(crowd.number + 1)])
        now = crowd.time + rng.choice([0.0, 0.5, 3.0])
        kept = ids(policy.order_waiting(crowd.table, end, now))
        assert kept == ids(policy.order(crowd.table, crowd.table.indices_before(end), now))


@pytest.mark.parametrize("token_s", [0.0, 0.05, 0.5])
def test_in_a_class_deadlines_go_as_among_its_requests_alone(token_s: float) -> None:
    rng = random.Random(f"classes {token_s}")
    crowd = Crowd(rng)
    policy = build_policy("priority > deadline", context(token_s))
    alone = build_policy("deadline", context(token_s))
    table = crowd.table
    for _ in range(20):
        for _ in range(rng.choice([1, 60])):
            crowd.come()
        for _ in range(rng.choice([0, 9])):
            crowd.change()
        now = crowd.time + rng.choice([0.0, 0.5, 3.0])
        expected = []
        for priority in range(2, -3, -1):
            indices = table.indices()
            own = indices[table.priority[indices] == priority]
            expected += ids(alone.order(table, own, now))
        assert ids(policy.order_waiting(table, EVERYBODY, now)) == expected


@pytest.mark.parametrize("text", ["deadline", "priority > deadline"])
def test_very_many_late_requests_delay_none_that_can_be_in_time(text: str) -> None:
    table = WaitingTable()
    for number in range(200):
        # All but the last five would need two seconds.
        ttft_ms = 1_000 + number if number < 195 else 5_000
        message = message_of(number, bytes(4 * 20), max_new=1)
        message = msgspec.structs.replace(message, ttft_ms=ttft_ms)
        table.append(Request(message, max_len=30, seed=0, arrival_order=number, arrival_s=0.0))
    policy = build_policy(text, context(token_s=0.1))
    expected = [*range(195, 200), *range(195)]
    assert ids(policy.order_waiting(table, EVERYBODY, 0.0)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_lane_has_its_entries_in_order(seed: int) -> None:
    rng = random.Random(f"lane {seed}")
    lane = Lane()
    expected: set[Entry] = set()
    longest = 0
    for round in range(120):
        num = rng.choice([1, 1, 3, 400 if round < 20 else 2])
        new = {(rng.randrange(50), rng.randrange(10_000)) for _ in range(num)} - expected
        lane.add(new)
        expected |= new
        for entry in rng.sample(sorted(expected), min(len(expected), rng.choice([0, 2, 40]))):
            lane.remove(entry)
            expected.remove(entry)
        assert list(lane) == sorted(expected)
        assert len(lane) == len(expected)
        longest = max(longest, len(lane))
        assert lane.first() == min(expected, default=None)
        low = (rng.randrange(50),)
        end = (rng.randrange(50),)
        assert list(lane.within(low, end)) == sorted(one for one in expected if low <= one < end)
    assert longest > 2 * BLOCK_SIZE


def test_an_entry_that_comes_to_a_large_lane_moves_no_others_but_those_of_its_block() -> None:
    lane = Lane()
    lane.add([(number,) for number in range(0, 20_000, 2)])
    blocks = {id(block): tuple(block) for block in lane._blocks}
    lane.add([(4_001,)])
    changed = [block for block in lane._blocks if blocks.get(id(block)) != tuple(block)]
    assert len(changed) == 1


def test_each_lane_has_its_own_and_only_members_are_in() -> None:
    crowd = Crowd(random.Random(1))
    for _ in range(100):
        crowd.come()
    members = set(range(0, 100, 2))

    class ByPriority:
        def lane(self, table: WaitingTable, indices: object) -> object:
            return table.priority[indices]  # type: ignore[index]

    lanes = Lanes((LongestPrefix(context()),), ByPriority().lane, members)  # type: ignore[arg-type]
    assert lanes.update(crowd.table) == {-2, -1, 0, 1, 2}
    for rank in range(-2, 3):
        found = ids(requests_of(crowd.table, lanes.lane(rank), EVERYBODY))
        mine = [one.id for one in crowd.table if one.message.priority == rank]
        assert found == [id for id in mine if id in members]
    assert not lanes.update(crowd.table)
    first = next(one for one in crowd.table if one.id in members)
    crowd.table.discard(first)
    members.remove(first.id)
    assert lanes.update(crowd.table) == {first.message.priority}


@pytest.mark.parametrize("text", KEPT)
def test_an_order_has_nothing_to_read_anew_if_somebody_has_looked_before(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    found = Lanes._found

    def see(
        lanes: Lanes, table: WaitingTable, indices: LongArray, arrivals: list[int]
    ) -> Iterator[tuple[int, Entry]]:
        read.extend(arrivals)
        return found(lanes, table, indices, arrivals)

    monkeypatch.setattr(Lanes, "_found", see)
    crowd = Crowd(random.Random(text))
    policy = build_policy(text, context())
    for num_coming in (100, 1, 60):
        for _ in range(num_coming):
            crowd.come()
        policy.look(crowd.table)
        assert read
        read.clear()
        list(policy.order_waiting(crowd.table, EVERYBODY, crowd.time))
        assert not read


def test_those_that_left_before_the_table_was_packed_again_are_out_of_their_lanes() -> None:
    crowd = Crowd(random.Random(3))
    for _ in range(63):
        crowd.come()
    table = crowd.table
    lanes = Lanes(())
    lanes.update(table)
    for request in list(table)[:5]:
        table.discard(request)
    crowd.come()
    crowd.come()
    assert table.changes.num_forgotten == 1
    lanes.update(table)
    waiting = [one.spec.arrival_order for one in table]
    assert [arrival for (arrival,) in lanes.lane(ONLY_LANE)] == waiting


def test_a_deadline_can_be_met_once_enough_of_the_prompt_is_cached() -> None:
    table = WaitingTable()
    for number, (prompt_len, ttft_ms) in enumerate([(5, 900), (20, 500)]):
        message = message_of(number, bytes(4 * prompt_len), max_new=1)
        message = msgspec.structs.replace(message, ttft_ms=ttft_ms)
        table.append(Request(message, max_len=30, seed=0, arrival_order=number, arrival_s=0.0))
    policy = build_policy("deadline", context(token_s=0.05))
    assert ids(policy.order_waiting(table, EVERYBODY, 0.0)) == [0, 1]
    table.set_cached_len(1, 11)
    assert ids(policy.order_waiting(table, EVERYBODY, 0.0)) == [1, 0]
    # It has waited too long to make it now.
    assert ids(policy.order_waiting(table, EVERYBODY, 0.1)) == [0, 1]


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_lane_is_a_sorted_list_also_where_blocks_are_divided(seed: int, rising: bool) -> None:
    rng = random.Random(seed)
    lane = Lane()
    expected: list[Entry] = []
    numbers = rng.sample(range(10_000), 6 * BLOCK_SIZE)
    if rising:
        numbers.sort()  # no later entry comes into a block that was divided
    for number in numbers:
        lane.add([(number,)])
        insort(expected, (number,))
        if rng.random() < 0.2:
            gone = rng.choice(expected)
            lane.remove(gone)
            expected.remove(gone)
        if rng.random() < 0.02:
            low, end = sorted(rng.sample(range(10_000), 2))
            assert list(lane.within((low,), (end,))) == [e for e in expected if low <= e[0] < end]
    assert list(lane) == expected
    # Each is found, also on both sides of the borders between blocks, which may lose any side
    # first.
    rng.shuffle(expected)
    for entry in expected:
        lane.remove(entry)
    assert len(lane) == 0
    assert lane.first() is None
