"""Requests with a known length, without a prefix cache: they are admitted by a simulation of the
completions of the running ones (`reserve/completions.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.scheduler.scenes import settings
from tests.scheduler.world import EOS, VOCAB, World
from tests.seeds import seeds
from weft.engine.explain import explain
from weft.messages.sampling import Grammar
from weft.scheduler import prefill
from weft.scheduler.history import Stop
from weft.scheduler.reserve.completions import CompletionBudget
from weft.scheduler.settings import SchedulerSettings, StateSettings, WindowSettings

SCENES_PER_TEST = 12


class Length(NamedTuple):
    prompt: int
    output: int


class Scene(NamedTuple):
    settings: SchedulerSettings
    depth: int
    lengths: list[Length]


class Outcome(NamedTuple):
    running: float  # requests with a row, on average over the steps in which others waited
    retractions: int


def random_scene(rng: random.Random) -> Scene:
    """Short prompts with outputs of any length, pages of 1 to 16 tokens, whole prompts and chunks,
    in steps of their own or with decodes."""
    page_size = rng.choice([1, 1, 2, 4, 16])
    chunk = rng.choice([-1, -1, 16, 32, 64])
    if chunk > 0:
        chunk = max(chunk, 2 * page_size)
    return Scene(
        uncached(
            num_pages=rng.randrange(160, 400) // page_size,
            page_size=page_size,
            max_running_requests=64,
            chunked_prefill_size=chunk,
            mixed_chunk=rng.random() < 0.5,
        ),
        rng.choice([0, 1]),
        [Length(rng.randrange(1, 20), rng.randrange(1, 80)) for _ in range(24)],
    )


def uncached(**changes: object) -> SchedulerSettings:
    found = settings(
        context_length=100,
        eos_token_ids=(EOS,),
        prefix_cache=False,
        max_running_requests=16,
        chunked_prefill_size=-1,
        max_prefill_tokens=1_000,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def in_full() -> AbstractContextManager[object]:
    """Requests get memory for their whole output, as if no length were known."""
    return patch.object(prefill, "can_simulate", lambda _: False)


def play(scene: Scene) -> Outcome:
    world = World(scene.settings, scene.depth)
    for number, length in enumerate(scene.lengths):
        send(world, number, length)
    num_running = 0
    num_steps = 0
    while world.has_work:
        world.step(check=False)
        if len(world.scheduler.waiting_queue):
            num_running += running(world)
            num_steps += 1
    world.check()
    ends = [world.finished[number].completion_tokens for number in range(len(scene.lengths))]
    assert ends == [length.output for length in scene.lengths]
    return Outcome(num_running / max(num_steps, 1), world.scheduler.counters.num_retractions)


def send(world: World, number: int, length: Length, **sampling: Any) -> int:
    prompt = [4 + number % (VOCAB - 4)] * length.prompt
    return world.send(prompt, max_new_tokens=length.output, ignore_eos=True, **sampling)


def running(world: World) -> int:
    return len(world.scheduler.requests) - len(world.scheduler.waiting_queue)


@pytest.mark.parametrize("block", seeds(1, 40))
def test_a_third_more_run_than_with_the_full_reserve_and_none_is_retracted(block: int) -> None:
    simulated = 0.0
    reserved = 0.0
    for seed in range(block * SCENES_PER_TEST, (block + 1) * SCENES_PER_TEST):
        scene = random_scene(random.Random(f"completions {seed}"))
        outcome = play(scene)
        assert outcome.retractions == 0, seed
        simulated += outcome.running
        with in_full():
            reserved += play(scene).running
    assert simulated >= 1.3 * reserved, (simulated, reserved)


def test_requests_join_as_soon_as_the_completions_leave_room_for_them() -> None:
    """Of 100 tokens, a request of 10 + 20 holds 10, and one of 10 + 60 may grow beside it: before
    the first ends, each has taken 20 more and may take one more; after its end, the other may take
    all."""
    world = World(uncached(num_pages=100, page_size=1))
    short = send(world, 0, Length(10, 20))
    long = send(world, 1, Length(10, 60))
    next_one = send(world, 2, Length(10, 30))
    world.step()
    # With all three: 100 - 30 free, and before the first end (20 + 1) * 3 = 63 are needed. Before
    # the second, 30 + 1 tokens of two requests: 62 of 70 + 10. Before the third 61 of 70 + 20.
    assert running(world) == 3
    world.run_dry()
    assert {world.finished[id].reason for id in (short, long, next_one)} == {"length"}
    assert world.scheduler.counters.num_retractions == 0
    # In full, 30 + 70 + 40 tokens are not there.
    full = World(uncached(num_pages=100, page_size=1))
    with in_full():
        for number, output in enumerate((20, 60, 30)):
            send(full, number, Length(10, output))
            full.step()
    assert running(full) == 1


@pytest.mark.parametrize(("num_pages", "fits"), [(93, False), (94, True)])
def test_the_last_token_decides(num_pages: int, fits: bool) -> None:
    """3 prompts of 10, and 21 more of each: 93 tokens, and one must be left over."""
    world = World(uncached(num_pages=num_pages, page_size=1))
    for number in range(3):
        send(world, number, Length(10, 20))
    world.step()
    assert running(world) == (3 if fits else 2)
    world.run_dry()
    assert world.scheduler.counters.num_retractions == 0


def test_a_request_joins_in_a_later_step_though_none_has_ended() -> None:
    """The two running ones come nearer to their ends with every step, so that one need not wait for
    an end to join."""
    world = World(uncached(num_pages=100, page_size=1))
    send(world, 0, Length(10, 36))
    send(world, 1, Length(10, 36))
    waiting = send(world, 2, Length(5, 36))
    world.step()
    assert running(world) == 2
    while world.request(waiting).admitted_s < 0:
        assert not world.finished
        world.step()
    assert not world.finished
    world.run_dry()
    assert world.scheduler.counters.num_retractions == 0


def test_who_may_end_at_any_token_is_not_waited_for() -> None:
    """A request that stops at EOS keeps its expected memory to its end, and promises none to
    others."""
    world = World(uncached(num_pages=100, page_size=1, schedule_conservativeness=2.0))
    world.send([7] * 10, max_new_tokens=40)  # all of its 40 tokens are kept: 50 of 100
    world.step()
    assert running(world) == 1
    send(world, 1, Length(10, 36))  # 10 + 37 of the 49 left, at its end
    world.step()
    assert running(world) == 2
    send(world, 2, Length(3, 20))
    world.step()
    assert running(world) == 2


def test_who_may_advance_by_several_tokens_has_all_its_memory() -> None:
    world = World(uncached(num_pages=100, page_size=1))
    send(world, 0, Length(10, 20))
    send(world, 1, Length(10, 20), grammar=Grammar("regex", "a*"))
    world.step()
    world.scheduler.merge_last_batch()
    rows = world.scheduler.running_batch.rows
    assert len(rows) == 2
    completions = CompletionBudget(world.scheduler.kv, rows, 0.5, [])
    assert len(completions._ends.left) == 1
    assert completions._promised == 19 + 1


@pytest.mark.parametrize("chunk", [8, 16])
def test_an_open_prompt_is_not_waited_for(chunk: int) -> None:
    """Its pieces may take any number of steps, so it counts with all that it will need."""
    world = World(
        uncached(num_pages=100, page_size=1, chunked_prefill_size=chunk, mixed_chunk=True)
    )
    send(world, 0, Length(4, 40))
    world.step()
    send(world, 1, Length(40, 10))
    send(world, 2, Length(2, 30))
    while world.has_work:
        world.step()
    assert world.scheduler.counters.num_retractions == 0


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_layers_with_windows_have_a_budget_of_their_own_beside_it(seed: int) -> None:
    rng = random.Random(f"windows {seed}")
    scene = random_scene(rng)
    step_tokens = 128
    page_size = scene.settings.page_size
    num_pages = (rng.randrange(320, 480) + step_tokens) // page_size
    windows = WindowSettings(window=12, num_pages=num_pages)
    changed = replace(
        scene.settings, windows=windows, max_prefill_tokens=step_tokens, chunked_prefill_size=64
    )
    assert play(scene._replace(settings=changed)).retractions == 0


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_layers_with_a_state_have_a_budget_of_their_own_beside_it(seed: int) -> None:
    rng = random.Random(f"states {seed}")
    scene = random_scene(rng)
    changed = replace(scene.settings, states=StateSettings(num_slots=rng.randrange(6, 30)))
    assert play(scene._replace(settings=changed)).retractions == 0


@pytest.mark.parametrize(
    "changes", [{"prefix_cache": True}, {"speculative": "ngram"}, {"num_stages": 2}]
)
def test_where_requests_share_memory_or_do_not_advance_together_nothing_is_simulated(
    changes: dict[str, object],
) -> None:
    with patch.object(prefill, "CompletionBudget", side_effect=AssertionError) as budget:
        world = World(uncached(**changes))
        send(world, 0, Length(10, 20))
        world.step()
    assert not budget.called
    assert running(world) == 1


def test_it_is_explained_with_the_numbers_of_the_tightest_completion() -> None:
    world = World(uncached(num_pages=93, page_size=1))
    ids = [send(world, number, Length(10, 20)) for number in range(3)]
    world.step()
    last = world.scheduler.history.last_pass
    assert last is not None
    assert last.stop is Stop.COMPLETIONS
    told = explain(world.scheduler, ids[2], world.time)
    assert told is not None
    assert told.why == (
        "waits: no KV memory before enough running requests complete: with it, 74 tokens will be "
        "needed before one of the completions, and 73 will be available"
    )
    assert not world.scheduler.waiting_queue.online.is_full


def lengths(pairs: Sequence[tuple[int, int]]) -> list[Length]:
    return [Length(*pair) for pair in pairs]


def test_eight_of_known_lengths_run_together_though_their_sum_is_larger_than_the_memory() -> None:
    """8 prompts of 10 with 10, 20, ... 80 tokens of output are 440 tokens in full."""
    scene = Scene(
        uncached(num_pages=320, page_size=1), 1, lengths([(10, 10 * n) for n in range(1, 9)])
    )
    world = World(scene.settings, scene.depth)
    for number, length in enumerate(scene.lengths):
        send(world, number, length)
    world.step()
    assert running(world) == 8
    world.run_dry()
    assert world.scheduler.counters.num_retractions == 0
    with in_full():
        assert play(scene).running < 8
