"""Who is refused when the queue is full, seeds and random orders, against plain twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults import Injected
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.plan.logits import LogitBias
from weft.scheduler.features.bias import joined
from weft.scheduler.policies.kinds.fair import Fair
from weft.scheduler.request import Request, seed_of

GOLDEN = 0x9E3779B97F4A7C15
ALL = (1 << 64) - 1


def splitmix(state: int) -> int:
    """What the published generator gives behind this state, as a signed number."""
    z = state & ALL
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & ALL
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & ALL
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def test_seeds_are_those_of_the_published_generator() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [seed_of(0, number) & ALL for number in range(3)] == published


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_the_seed_of_a_request_is_one_of_a_sequence(seed: int, number: int) -> None:
    assert seed_of(seed, number) == splitmix(seed + (number + 1) * GOLDEN)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 + 3])
def test_the_random_order_is_that_of_the_published_generator(seed: int) -> None:
    world = World(settings(schedule_policy="random", seed=seed, max_running_requests=1))
    for number in range(200):
        world.send([number], max_new_tokens=1)
    keys = [splitmix((number + (seed % 2**32 << 32) + 1) * GOLDEN) for number in range(200)]
    queue = world.scheduler.waiting_queue.online
    assert [one.id for one in queue.order(0.0)] == sorted(range(200), key=keys.__getitem__)
    assert queue.policy.key(queue._waiting, queue._waiting.indices(), 0.0).tolist() == keys


class FullQueue:
    """A queue as a list of (id, class, tokens), the lowest number of a class being the best."""

    def __init__(self, max_requests: int, max_tokens: int, has_classes: bool) -> None:
        self.waiting: list[tuple[int, int, int]] = []
        self._limits = max_requests, max_tokens
        self._has_classes = has_classes

    def _fits(self, waiting: list[tuple[int, int, int]]) -> bool:
        max_requests, max_tokens = self._limits
        num_tokens = sum(tokens for _, _, tokens in waiting)
        return len(waiting) <= max_requests and (not max_tokens or num_tokens <= max_tokens)

    def come(self, id: int, rank: int, tokens: int) -> set[int]:
        """Who is refused."""
        newcomer = id, rank, tokens
        left = [*self.waiting, newcomer]
        if len(left) > 1:
            lower = [one for one in self.waiting if one[1] > rank] if self._has_classes else []
            while not self._fits(left) and lower:
                loser = max(lower, key=lambda one: (one[1], one[0]))
                lower.remove(loser)
                left.remove(loser)
            if not self._fits(left):
                left = self.waiting
        refused = {one[0] for one in [*self.waiting, newcomer]} - {one[0] for one in left}
        self.waiting = list(left)
        return refused


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize("seed", range(8))
def test_a_full_queue_refuses_the_latest_of_the_lowest_class_or_the_arrival(
    seed: int, policy: str
) -> None:
    rng = random.Random(f"queue {seed}")
    limits = rng.randrange(1, 6), rng.choice([0, 0, 30, 60])
    low_first = rng.random() < 0.5
    values = {
        "schedule_policy": policy,
        "max_queued_requests": limits[0],
        "max_queued_tokens": limits[1],
    }
    world = World(settings(low_priority_first=low_first, max_running_requests=1, **values))
    world.send([1], max_new_tokens=100, ignore_eos=True)  # has the only row
    world.step()
    queue = FullQueue(*limits, has_classes=policy == "priority")
    for id in range(1, 81):
        priority, tokens = rng.randrange(3), rng.randrange(1, 40)
        world.send([1] * tokens, max_new_tokens=1, priority=priority)
        refused = queue.come(id, priority if low_first else -priority, tokens)
        output = world.scheduler.outbox.take_output()
        told = {finish.id for finish in output.finished} if output else set()
        assert told == refused
        assert all(finish.status == 503 for finish in (output.finished if output else ()))
        if rng.random() < 0.1:
            gone = rng.choice([*queue.waiting, (-1, 0, 0)])
            queue.waiting = [one for one in queue.waiting if one is not gone]
            if gone[0] >= 0:
                world.scheduler._finish(world.request(gone[0]), "abort")
                world.scheduler.outbox.take_output()
    assert world.scheduler.counters.num_queue_full > 5
    assert world.scheduler.waiting_queue.num_tokens == sum(tokens for _, _, tokens in queue.waiting)


def test_a_request_with_the_number_of_an_open_one_is_counted_and_changes_nothing() -> None:
    world = World(settings())
    id = world.send([1, 2], max_new_tokens=5, ignore_eos=True)
    before = world.scheduler.stats()
    for times in range(1, 4):
        world.take_in(world.sent[id])
        assert world.scheduler.counters.messages.num_duplicates == times
    assert world.scheduler.stats().num_waiting == before.num_waiting
    world.run_dry()
    world.check_outputs()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_several_biases_become_one_with_all_their_places(sizes: list[int]) -> None:
    biases, expected = [], []
    for part, size in enumerate(sizes):
        index, tokens = np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32) + 10 * part
        values = tokens.astype(np.float32) / 2
        biases.append(LogitBias(index=index, tokens=tokens, values=values))
        expected += zip(index.tolist(), tokens.tolist(), values.tolist(), strict=True)
    bias = joined(biases)
    found = zip(bias.index.tolist(), bias.tokens.tolist(), bias.values.tolist(), strict=True)
    assert list(found) == expected
    assert bias.after is None


@pytest.mark.parametrize("before", ["fcfs", "lpm"])
def test_a_policy_that_cannot_take_over_leaves_the_one_before_in_its_place(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(settings(schedule_policy=before, max_running_requests=1))
    for number in range(5):
        world.send([number, 7], max_new_tokens=2, tenant=f"t{number % 2}")
    queue, cache = world.scheduler.waiting_queue.online, world.scheduler.kv.cache
    policy, listeners, order = queue.policy, [*cache.tree.listeners], list(queue.order(0.0))

    def fails(self: Fair, request: Request) -> int:
        raise Injected("planted")

    monkeypatch.setattr(Fair, "arrived", fails)
    with pytest.raises(Injected):
        world.scheduler.set_policy("fair")
    assert queue.policy is policy
    assert cache.tree.listeners == listeners
    assert list(queue.order(0.0)) == order
    assert world.scheduler.settings.schedule_policy == before
    world.run_dry()
    world.check_outputs()


@pytest.mark.parametrize("aging_s", [30.0, 0.0])
def test_a_request_is_overdue_from_the_moment_on_at_which_it_has_waited_so_long(
    aging_s: float,
) -> None:
    world = World(settings(aging_s=aging_s))
    world.time = 64.0  # so that sums are exact
    request = world.scheduler.requests[world.send([1], max_new_tokens=1)]
    arrival_s = request.spec.arrival_s
    moments = (arrival_s, arrival_s + 29.75, arrival_s + 30.0, arrival_s + 90.0)
    is_overdue = [world.scheduler.waiting_queue.is_overdue(request, now) for now in moments]
    if aging_s:
        assert is_overdue == [False, False, True, True]
    else:
        assert not any(is_overdue)
