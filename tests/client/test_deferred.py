"""Requests that ask for more completions than they may have in the engine at a time."""

from __future__ import annotations

import msgspec
import pytest

from tests.client.client_world import READY, World
from tests.client.completions import make_request
from weft.client.deferred import DeferredRequests, ShareLimits
from weft.client.generation import Generation
from weft.messages.codec import Unreadable
from weft.messages.replies import Finish
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams


@pytest.fixture
def world() -> World:
    """Eight rows, of which one request may have four."""
    world = World(max_request_share=0.5)
    world.client.deliver(msgspec.structs.replace(READY, max_running_requests=8))
    return world


def ids_of(generation: Generation) -> list[int]:
    return [completion.spec.request.id for completion in generation.completions]


def end(world: World, *ids: int) -> None:
    world.step(*((id, 97) for id in ids), finished=[Finish(id=id, reason="length") for id in ids])


def test_a_request_has_its_share_of_rows_and_one_follows_for_each_that_ends(world: World) -> None:
    generation = world.submit(n=10, stream=False)
    first, *_ = ids = ids_of(generation)
    assert [request.id for request in world.requests] == ids[:4]
    assert world.client.num_open == 10
    end(world, first, ids[2])
    assert [request.id for request in world.requests] == ids[:6]
    assert all(request.input_ids == world.requests[0].input_ids for request in world.requests)
    while world.client.num_open:
        end(
            world,
            *[
                request.id
                for request in world.requests
                if request.id in world.client.deliveries.open.by_id
            ],
        )
    assert [request.id for request in world.requests] == ids
    assert generation.ended


def test_nothing_is_kept_of_a_request_that_has_ended_though_its_consumer_stays(
    world: World,
) -> None:
    generation = world.submit(n=10, stream=False)
    num_seen = 0
    while not generation.ended:
        sent = world.requests[num_seen:]
        num_seen = len(world.requests)
        end(world, *[request.id for request in sent])
    assert world.client.deliveries.open.is_empty
    assert not generation.closed


def test_at_no_time_has_the_engine_more_of_one_request_than_its_share(world: World) -> None:
    generation = world.submit(n=20, stream=False)
    there: set[int] = set()
    num_seen = 0
    while not generation.ended:
        there |= {request.id for request in world.requests[num_seen:]}
        num_seen = len(world.requests)
        assert len(there) == min(4, world.client.num_open)
        end(world, there.pop())


def test_later_requests_do_not_wait_for_deferred_ones(world: World) -> None:
    large, small = world.submit(n=10), world.submit(n=2)
    assert [request.id for request in world.requests] == ids_of(large)[:4] + ids_of(small)


def test_deferred_requests_are_aborted_here_and_the_others_by_the_engine(world: World) -> None:
    generation = world.submit(n=10, stream=False, rid="mine")
    ids = ids_of(generation)
    assert world.client.deliveries.abort("mine") == 10
    [abort] = world.aborts
    assert sorted(abort.ids) == ids[:4]
    assert world.client.num_open == 4
    world.step(finished=[Finish(id=id, reason="abort") for id in ids[:4]])
    assert [request.id for request in world.requests] == ids[:4], "nobody follows"
    assert {one.end.reason for one in generation.completions if one.end is not None} == {"abort"}
    assert generation.ended


def test_aborting_all_and_leaving_let_nobody_follow(world: World) -> None:
    aborted, left = world.submit(n=6, rid="a"), world.submit(n=6, rid="b")
    left.close()
    assert world.client.num_open == 6
    assert world.client.deliveries.abort_all() == 6
    end(world, *ids_of(aborted)[:4])
    assert len(world.requests) == 8
    assert world.client.num_open == 0


def test_a_lost_engine_ends_deferred_requests(world: World) -> None:
    generation = world.submit(n=10, stream=False)
    world.client.engine_lost("gone")
    assert {one.end.status for one in generation.completions if one.end is not None} == {503}
    assert generation.ended
    assert len(world.requests) == 4


def test_without_a_share_everything_goes_to_the_engine_at_once() -> None:
    world = World()
    world.client.deliver(msgspec.structs.replace(READY, max_running_requests=8))
    world.submit(n=10)
    assert len(world.requests) == 10


def test_time_that_a_request_spends_here_is_taken_from_its_time() -> None:
    now = 100.0
    request = GenerateRequest(
        id=1, rid="r", input_ids=b"", sampling=SamplingParams(), timeout_ms=5_000
    )
    requests = [msgspec.structs.replace(request, id=id) for id in (1, 2, 3)]
    held = DeferredRequests(requests, ShareLimits(1, 0, 1), lambda: now)
    limits: list[int | None] = []
    for passed_s in (0.0, 3.0, 30.0):
        now += passed_s
        [taken] = held.take()
        limits.append(taken.timeout_ms)
        held.ended(taken.id)
    assert limits == [5_000, 2_000, 1]  # the engine says that its time is over
    assert held.take() == []


# ---- what others find before them


STEP_TOKENS = 32


@pytest.fixture
def paced() -> World:
    """Sixty-four rows, and steps of 32 tokens of prompts."""
    world = World(max_request_share=0.75)
    ready = msgspec.structs.replace(
        READY, max_running_requests=64, step_tokens=STEP_TOKENS, page_size=4
    )
    world.client.deliver(ready)
    return world


class FirstCome:
    """An engine that computes prompts in the order of their arrival, up to a number of tokens in a
    step; every request costs a page at least, and each running one gets a token in each step."""

    def __init__(self, world: World, output_len: int) -> None:
        self._world = world
        self._output_len = output_len
        self._num_seen = 0
        self._queue: list[GenerateRequest] = []
        self._left: dict[int, int] = {}  # of running requests: tokens to come
        self._computed: set[bytes] = set()  # prompts
        self.most_running = 0
        self.num_steps = 0

    def step(self) -> list[int]:
        """Returns the requests that began."""
        self._queue += self._world.requests[self._num_seen :]
        self._num_seen = len(self._world.requests)
        begun: list[int] = []
        num_tokens = 0
        while self._queue:
            request = self._queue[0]
            is_cached = request.input_ids in self._computed
            num_tokens += 4 if is_cached else -(-len(request.input_ids) // 16) * 4
            if begun and num_tokens > STEP_TOKENS:
                break
            self._computed.add(request.input_ids)
            begun.append(self._queue.pop(0).id)
        self._left |= dict.fromkeys(begun, self._output_len)
        self.most_running = max(self.most_running, len(self._left))
        ids = list(self._left)
        for id in ids:
            self._left[id] -= 1
        ended = [id for id in ids if self._left[id] == 0]
        for id in ended:
            del self._left[id]
        self.num_steps += 1
        self._world.step(
            *((id, 97) for id in ids), finished=[Finish(id=id, reason="length") for id in ended]
        )
        return begun


@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("n", [1, 64])
def test_who_comes_beside_a_large_request_begins_in_the_next_step(
    paced: World, n: int, num_steps_before: int
) -> None:
    prompts = [make_request([*b"prompt ", i], SamplingParams(n=n), rid="large") for i in range(64)]
    paced.client.submit(prompts, stream=False)
    engine = FirstCome(paced, output_len=40)
    for _ in range(num_steps_before):
        engine.step()
    small = paced.submit("somebody else", stream=False)
    assert small.completions[0].spec.request.id in engine.step()


def test_a_large_request_still_fills_its_share_of_the_rows(paced: World) -> None:
    prompt = make_request(list(b"prompt"), SamplingParams(n=50), rid="large")
    generation = paced.client.submit([prompt] * 4, stream=False)
    engine = FirstCome(paced, output_len=40)
    while not generation.ended:
        engine.step()
    assert engine.most_running == 48
    # 200 of 48 at a time with 40 tokens each, and a step more for each four that begin.
    assert engine.num_steps <= 200 / 48 * 40 + 200 / 4 + 10


def test_completions_that_the_client_gives_up_let_others_follow(world: World) -> None:
    generation = world.submit(n=6, stream=False)
    first_ids = ids_of(generation)[:4]
    world.client._give_up(Unreadable(None, frozenset(first_ids)))
    assert [request.id for request in world.requests] == ids_of(generation)
    end(world, *ids_of(generation)[4:])
    assert generation.ended
    assert world.client.deliveries.open.is_empty
