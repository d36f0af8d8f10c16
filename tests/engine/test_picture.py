"""Pictures of the engine's work: they agree with what requests, loads and books say, and decide
nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.engine.explain import explain
from weft.engine.picture.queue import MAX_QUEUED
from weft.engine.picture.service import WATCH_S
from weft.memory.index.survey import MAX_FOUND
from weft.messages.cache import ForgetPrefix, ForgetPrefixReply
from weft.messages.control import ListRequests, ListRequestsReply
from weft.messages.picture import GetPrefix, GetPrefixReply, Picture, StepColumns, Watch
from weft.plan.step import ForwardMode


def ints(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype=np.int32).tolist()


def numbers(steps: StepColumns) -> list[int]:
    return np.frombuffer(steps.numbers, dtype=np.int64).tolist()


def look(world: EngineWorld, **since: int) -> Picture:
    """The next picture, which comes behind one more step."""
    before = len(world.answers(Picture))
    assert world.tell(Watch(call=7, **since)) is None
    world.step()
    pictures = world.answers(Picture)
    assert len(pictures) == before + 1
    assert pictures[-1].call == 7
    return pictures[-1]


def crowd(world: EngineWorld, count: int = 9) -> None:
    for number in range(count):
        world.send([number, *range(50, 70)], max_new_tokens=30)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_and_reasons_are_those_of_the_list_of_requests(depth: int) -> None:
    world = EngineWorld(settings(), depth)
    crowd(world)
    world.steps(6)
    picture = look(world)
    listed = world.tell(ListRequests(call=1))
    assert isinstance(listed, ListRequestsReply)
    running = [row for row in listed.requests if row.position is None]
    waiting = [row for row in listed.requests if row.position is not None]
    assert len(running) == 4
    assert len(waiting) == 5
    rows = picture.rows
    assert rows.rids == [row.rid for row in running]
    assert ints(rows.prompt_len) == [row.prompt_tokens for row in running]
    assert ints(rows.num_output) == [row.output_tokens for row in running]
    assert ints(rows.cached_len) == [row.cached_tokens for row in running]
    assert picture.queue.rids == [row.rid for row in waiting]
    assert picture.queue.reasons == [row.why for row in waiting]
    assert all(picture.queue.reasons)
    stats = picture.stats
    assert stats.num_running == 4
    assert stats.num_waiting == 5
    assert stats.max_running_requests == 4


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_decodes_from_its_first_token_on(depth: int) -> None:
    world = EngineWorld(settings(), depth)
    crowd(world, 4)
    has_seen_both = set()
    for _ in range(12):
        rows = look(world).rows
        for is_decoding, num_output in zip(
            ints(rows.is_decoding), ints(rows.num_output), strict=True
        ):
            assert (is_decoding == 1) == (num_output > 0)
            has_seen_both.add(is_decoding)
    assert has_seen_both == {0, 1}


def test_rows_have_the_causes_of_their_requests_a_few_in_each_picture() -> None:
    world = EngineWorld(settings(chunked_prefill_size=200, page_size=1))
    world.send([9, *range(50, 90)], max_new_tokens=1)
    world.run_dry()
    ids = [world.send([9, number, *range(51, 90)], max_new_tokens=30) for number in range(3)]
    first = look(world).rows
    assert (first.causes, ints(first.missed_len)) == (["changed", "changed", ""], [39, 39, 0])
    rows = look(world).rows
    for id, cause, missed_len in zip(ids, rows.causes, ints(rows.missed_len), strict=True):
        found = explain(world.scheduler, id, world.time)
        assert found is not None
        assert found.cache_cause is not None
        assert (cause, missed_len) == (found.cache_cause.cause, found.cache_cause.missed_tokens)
    world.run_dry()
    world.send([9, *range(50, 90)], max_new_tokens=30)
    rows = look(world).rows
    assert (rows.causes, ints(rows.missed_len)) == (["found"], [0]), "of another request in a row"


@pytest.mark.parametrize("depth", [0, 1])
def test_each_step_is_reported_once_with_what_it_ran(depth: int) -> None:
    world = EngineWorld(settings(), depth)
    since = look(world).stats.total_steps - 1
    crowd(world, 4)
    told: list[int] = []
    tokens = 0
    rows: list[int] = []
    while world.has_work:
        world.time += 0.5
        picture = look(world, since_step=since)
        steps = picture.steps
        told += numbers(steps)
        tokens += sum(ints(steps.num_tokens))
        rows += ints(steps.num_rows)
        since = told[-1] if told else since
        for mode, num_prompts in zip(ints(steps.modes), ints(steps.num_prompts), strict=True):
            assert (num_prompts > 0) == (mode in (ForwardMode.EXTEND, ForwardMode.MIXED))
        assert (np.frombuffer(steps.seconds, dtype=np.float32) >= 0).all()
    stats = look(world).stats
    assert told == list(range(told[0], stats.total_steps))
    assert len(told) == stats.total_steps
    # Each step computes prompts, or one token of each row that decodes.
    decoded = stats.total_generated_tokens - 4
    assert tokens == stats.total_prefilled_tokens + decoded
    assert max(rows) == 4


def test_a_picture_without_work_comes_at_once_and_nobody_is_asked_any_more_afterwards() -> None:
    world = EngineWorld(settings())
    picture = look(world)
    assert picture.rows.rids == []
    assert picture.queue.rids == []
    assert numbers(picture.steps) == []
    hooks = world.engine.core.hooks
    pictures = world.engine.services.observers.pictures
    assert pictures in hooks.attached
    assert not world.engine.has_work
    world.time += WATCH_S + 1
    world.send([1, 2, 3], max_new_tokens=3)
    world.run_dry()
    assert pictures not in hooks.attached
    assert len(world.answers(Picture)) == 1


def test_the_sums_of_memory_are_the_pool_and_the_tree_is_what_is_cached() -> None:
    world = EngineWorld(settings())
    crowd(world)
    world.run_dry()
    picture = look(world)
    stats = picture.stats
    assert stats.kv_used + stats.kv_evictable + stats.kv_held <= stats.kv_tokens
    tree = picture.tree
    assert tree is not None
    assert tree.is_whole
    parents = ints(tree.parents)
    below = np.frombuffer(tree.num_below, dtype=np.int64).tolist()
    tops = [size for parent, size in zip(parents, below, strict=True) if parent < 0]
    assert sum(tops) == stats.kv_evictable
    for place, parent in enumerate(parents):
        assert parent < place
        children = [below[k] for k, above in enumerate(parents) if above == place]
        assert below[place] == ints(tree.num_tokens)[place] + sum(children)
    assert look(world, since_round=tree.round + 1).tree is None  # a second is over: another walk


def test_a_node_of_the_tree_tells_who_uses_it_and_is_gone_when_it_is_forgotten() -> None:
    world = EngineWorld(settings(page_size=1))
    shared = list(range(50, 70))
    world.send([1, *shared], max_new_tokens=1)
    world.send([2, *shared], max_new_tokens=1)
    world.run_dry()
    world.send([1, *shared, 5], max_new_tokens=30)
    world.steps(3)
    tree = look(world).tree
    assert tree is not None
    heads = [ints(head) for head in tree.heads]
    used, free = (
        ints(tree.numbers)[place]
        for first in (1, 2)
        for place, head in enumerate(heads)
        if head[:1] == [first]
    )
    found = world.tell(GetPrefix(node=used))
    assert isinstance(found, GetPrefixReply)
    assert ints(found.tokens)[:21] == [1, *shared]
    [row] = world.engine.scheduler.requests.values()
    assert found.start == 0
    assert found.hits == 1
    assert found.requests == [row.message.rid]
    kept = world.tell(ForgetPrefix(tokens=found.tokens))
    assert isinstance(kept, ForgetPrefixReply)
    assert kept.tokens == 0
    assert kept.left == len(found.tokens) // 4
    other = world.tell(GetPrefix(node=free))
    assert isinstance(other, GetPrefixReply)
    gone = world.tell(ForgetPrefix(tokens=other.tokens, keep=5))
    assert isinstance(gone, ForgetPrefixReply)
    assert gone.tokens == len(other.tokens) // 4 - 5
    assert gone.left == 5
    world.tell(ForgetPrefix(tokens=other.tokens))
    assert world.tell(GetPrefix(node=free)) == GetPrefixReply()
    # A node has its number in all pictures.
    world.run_dry()
    again = None
    while again is None:
        world.time += 2.0
        again = look(world, since_round=tree.round).tree
    assert used in ints(again.numbers)


def test_a_long_queue_and_a_large_tree_make_no_larger_picture() -> None:
    world = EngineWorld(settings(num_pages=4_000, max_running_requests=2))
    rng = random.Random(1)
    for _ in range(300):
        world.send([rng.randrange(200) for _ in range(9)], max_new_tokens=1)
    picture = look(world)
    assert len(picture.queue.rids) == MAX_QUEUED
    assert picture.stats.num_waiting > MAX_QUEUED
    world.run_dry()
    tree = None
    while tree is None or tree.num_nodes < MAX_FOUND:
        world.time += 0.2
        tree = look(world).tree
    assert len(tree.heads) == MAX_FOUND


def test_a_journal_leaves_viewers_out_and_is_replayed_bit_for_bit() -> None:
    plain = RecordedWorld(settings(num_pages=150))
    watched = RecordedWorld(settings(num_pages=150))
    for world in (plain, watched):
        rng = random.Random(3)
        for step in range(60):
            world.send([rng.randrange(300) for _ in range(20)], max_new_tokens=rng.randrange(30))
            if world is watched and step % 3 == 0:
                world.tell(Watch(call=step))
            world.step()
        world.run_dry()
    assert plain.records[1:] == watched.records[1:]  # the first has the time of day
    assert watched.replay(check=True).difference is None


def test_a_state_is_put_aside_and_taken_up_while_somebody_looks() -> None:
    world = RecordedWorld(settings(num_pages=150))
    world.put_aside_in_every_step()
    for number in range(12):
        world.send([number, 5, 6, 7], max_new_tokens=9)
        world.tell(Watch(call=number))
        world.step()
    world.run_dry()
    assert world.replay(check=True).difference is None
