"""Requests that ask for more completions than they may have in the engine at a time."""

from __future__ import annotations

import msgspec
import pytest

from tests.client.test_client import READY, World
from weft.client.engine_state import DeferredRequests
from weft.client.generation import Generation
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
    return [completion.spec.id for completion in generation.completions]


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
            *[request.id for request in world.requests if request.id in world.client._open.by_id],
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
    assert world.client._open.is_empty
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


def test_who_comes_later_does_not_wait_for_what_is_held_back(world: World) -> None:
    large, small = world.submit(n=10), world.submit(n=2)
    assert [request.id for request in world.requests] == ids_of(large)[:4] + ids_of(small)


def test_what_is_held_back_is_aborted_here_and_the_rest_by_the_engine(world: World) -> None:
    generation = world.submit(n=10, stream=False, rid="mine")
    ids = ids_of(generation)
    assert world.client.abort("mine") == 10
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
    assert world.client.abort_all() == 6
    end(world, *ids_of(aborted)[:4])
    assert len(world.requests) == 8
    assert world.client.num_open == 0


def test_an_engine_that_is_lost_ends_what_is_held_back(world: World) -> None:
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
    held = DeferredRequests([request, msgspec.structs.replace(request, id=2)], lambda: now)
    now += 3.0
    first = held.take()
    now += 30.0
    second = held.take()
    assert first is not None
    assert second is not None
    assert (first.timeout_ms, second.timeout_ms) == (
        2_000,
        1,
    )  # the engine says that its time is over
    assert held.take() is None
