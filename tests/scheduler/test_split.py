"""Prefills that are split by layers: what runs between the pieces, who may leave, what is shared,
and random schedules."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.scheduler.random_worlds import run_random, run_timed
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import Recorder, settings
from tests.scheduler.streams import seconds
from tests.scheduler.world import World
from tests.seeds import every_second, seeds
from weft.engine.explain import explain
from weft.messages.control import ContinueGeneration, PauseGeneration
from weft.messages.requests import Abort
from weft.plan.step import ForwardMode, LayerSpan
from weft.scheduler.history import Stop
from weft.scheduler.settings import SchedulerSettings, StateSettings, WindowSettings
from weft.scheduler.split.planner import SplitPlanner

EXTEND = ForwardMode.EXTEND
DECODE = ForwardMode.DECODE
SPLIT = ForwardMode.SPLIT_PREFILL


def layered(**changes: object) -> SchedulerSettings:
    """Of a model with 8 layers; pieces have 2."""
    values: dict[str, object] = {
        "num_layers": 8,
        "split_prefill_layers": 2,
        "chunked_prefill_size": 2_048,
        "num_pages": 8_000,
        "context_length": 2_000,
        **changes,
    }
    return settings(**values)


def stream(world: World, length: int = 4) -> int:
    """Send a request that decodes for a long time, and let it begin."""
    id = world.send(list(range(10, 10 + length)), max_new_tokens=150, ignore_eos=True)
    world.step()
    world.step()
    return id


def spans(world: Recorder) -> list[tuple[int, int]]:
    layers = [plan.layers for plan in world.plans if plan.layers is not None]
    return [(one.first, one.last) for one in layers]


def prompt(length: int, first: int = 20) -> list[int]:
    return [first + i % 200 for i in range(length)]


# Pieces


@pytest.mark.parametrize("depth", [0, 1])
def test_running_requests_decode_between_the_pieces_of_a_prompt(depth: int) -> None:
    world = Recorder(layered(), depth)
    stream(world)
    world.plans.clear()
    id = world.send(prompt(1_500), max_new_tokens=3, ignore_eos=True)
    world.run_dry()
    modes = [plan.mode for plan in world.plans[:9]]
    assert modes == [SPLIT, DECODE, SPLIT, DECODE, SPLIT, DECODE, SPLIT, DECODE, DECODE]
    assert spans(world) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    first, _, second = world.plans[:3]
    assert first.slots.tolist() == second.slots.tolist()
    assert first.table is None
    assert len(world.outputs[id]) == 3
    assert world.scheduler.stats().total_split_steps == 4
    world.check_outputs()
    world.check_idle()


def test_the_longest_gap_of_a_stream_is_a_third_of_the_prefill_at_most() -> None:
    gaps = {}
    for split in (0, 2):
        world = World(layered(split_prefill_layers=split, max_slowdown=-1.0))
        world.let_steps_cost(seconds)
        world.tick_s = 0.0
        streaming = stream(world)
        world.send(prompt(1_500), max_new_tokens=1, ignore_eos=True)
        last = world.time
        longest = 0.0
        for _ in range(30):
            before = len(world.outputs[streaming])
            world.step()
            if len(world.outputs[streaming]) > before:
                longest = max(longest, world.time - last)
                last = world.time
        gaps[split] = longest
    assert gaps[2] <= gaps[0] / 3


def test_a_prefill_is_whole_while_nobody_decodes() -> None:
    world = Recorder(layered())
    world.send(prompt(600), max_new_tokens=3)
    world.step()
    assert [plan.mode for plan in world.plans] == [EXTEND]


def test_all_layers_that_are_left_run_at_once_when_nobody_decodes_any_more() -> None:
    world = Recorder(layered())
    running = stream(world)
    world.send(prompt(600), max_new_tokens=3)
    world.step()
    world.abort(Abort(ids=(running,)))
    world.run_dry()
    assert spans(world) == [(0, 2), (2, 8)]
    world.check_outputs()


def test_a_prompt_that_is_not_worth_its_pieces_is_computed_whole() -> None:
    world = Recorder(layered())
    stream(world)
    world.send(prompt(17), max_new_tokens=3)
    world.send(prompt(32, first=90), max_new_tokens=3)
    world.step()
    assert spans(world) == [(0, 3)]  # 16 tokens through all layers are worth a step
    world.run_dry()
    assert spans(world) == [(0, 3), (3, 6), (6, 8)]
    world.send(prompt(9, first=60), max_new_tokens=3)
    world.run_dry()
    assert len(spans(world)) == 3
    world.check_outputs()


def test_a_chunk_of_a_prompt_may_itself_be_split() -> None:
    world = Recorder(layered(chunked_prefill_size=512))
    stream(world)
    world.plans.clear()
    world.send(prompt(1_000), max_new_tokens=2)
    world.run_dry()
    pieces = [plan for plan in world.plans if plan.layers is not None]
    assert [int(plan.starts[0]) for plan in pieces] == [0, 0, 0, 0, 512, 512, 512, 512]
    between = [plan.mode for plan in world.plans[:16]]
    assert between == [SPLIT, DECODE] * 8
    world.check_outputs()


def test_several_prompts_of_one_pass_are_split_together() -> None:
    world = Recorder(layered())
    stream(world)
    for first in (20, 50, 80):
        world.send(prompt(300, first), max_new_tokens=2)
    world.run_dry()
    pieces = [plan for plan in world.plans if plan.layers is not None]
    assert [len(plan.rows) for plan in pieces] == [3, 3, 3, 3]
    world.check_outputs()


def test_running_requests_have_a_step_between_two_prefills() -> None:
    world = Recorder(layered())
    stream(world)
    world.plans.clear()
    for _ in range(2):
        world.send(prompt(10, first=len(world.sent) * 40), max_new_tokens=2)
        world.step()
        world.step()
    assert [plan.mode for plan in world.plans] == [EXTEND, DECODE] * 2


# Who leaves


@pytest.mark.parametrize("windows", [None, WindowSettings(window=30, num_pages=3_000)])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_an_abort_between_pieces_frees_all(pieces: int, windows: WindowSettings | None) -> None:
    world = World(layered(windows=windows))
    stream(world)
    kv = world.scheduler.kv
    cached = kv.cache.evictable_pages + kv.cache.protected_pages
    id = world.send(prompt(700), max_new_tokens=3)
    for _ in range(2 * pieces - 1):
        world.step()
    assert world.request(id).row >= 0
    world.abort(Abort(ids=(id,)))
    world.check()
    assert kv.cache.evictable_pages + kv.cache.protected_pages - cached < 30
    assert not world.scheduler.prefills.open_prompts()
    world.run_dry()
    world.check_outputs()
    world.check_idle()


@pytest.mark.parametrize("left", [(1,), (2,), (1, 3), (2, 3), (1, 2, 3)])
def test_a_request_that_leaves_between_pieces_takes_nothing_from_the_others(
    left: tuple[int, ...],
) -> None:
    world = Recorder(layered())
    stream(world)
    for first in (20, 50, 80):
        world.send(prompt(300, first), max_new_tokens=4)
    world.step()
    world.step()
    world.abort(Abort(ids=left))
    world.run_dry()
    kept = [plan.layers.kept for plan in world.plans if plan.layers is not None]
    assert sum(one is not None for one in kept) == (len(left) < 3)
    world.check_outputs()
    world.check_idle()


def test_what_is_retracted_between_pieces_is_computed_again() -> None:
    world = World(layered())
    stream(world)
    id = world.send(prompt(700), max_new_tokens=3)
    world.step()
    world.scheduler.retract(world.request(id))
    world.check()
    world.run_dry()
    assert world.finished[id].retractions == 1
    assert world.finished[id].cached_tokens == 0
    world.check_outputs()
    world.check_idle()


def test_only_chunks_that_were_computed_whole_stay_in_the_cache() -> None:
    world = World(layered(chunked_prefill_size=512))
    stream(world)
    id = world.send(prompt(1_000), max_new_tokens=3)
    while world.scheduler.stats().total_split_steps < 6:
        world.step()
    world.abort(Abort(ids=(id,)))
    world.check()
    again = world.send(prompt(1_000), max_new_tokens=3)
    world.run_dry()
    assert world.finished[again].cached_tokens == 512
    world.check_outputs()


def test_half_computed_tokens_are_nobodys_prefix() -> None:
    world = World(layered())
    stream(world)
    world.send(prompt(700), max_new_tokens=3)
    world.step()
    other = world.send([*prompt(600), 7], max_new_tokens=3)
    world.step()
    assert world.request(other).row < 0
    world.run_dry()
    assert world.finished[other].cached_tokens == 600  # behind the last piece
    world.check_outputs()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_between_pieces_loses_nothing(mode: str) -> None:
    world = RecordedWorld(layered())
    stream(world)
    id = world.send(prompt(700), max_new_tokens=3)
    world.step()
    world.tell(PauseGeneration(call=1, mode=mode))  # type: ignore[arg-type]
    world.step()
    world.tell(PauseGeneration(call=2, mode="in_place"))
    assert (id in world.finished) == (mode == "abort")
    world.tell(ContinueGeneration(call=3))
    world.run_dry()
    world.check_outputs()
    world.check_idle()


def test_a_step_that_fails_between_pieces_ends_its_requests_and_no_others() -> None:
    world = World(layered(), fail_steps={5})
    running = stream(world)
    ids = [world.send(prompt(300, first), max_new_tokens=4) for first in (20, 60)]
    world.run_dry()
    failed = {id for id, finish in world.finished.items() if finish.reason == "error"}
    assert failed in ({running}, set(ids))
    world.check_outputs()
    world.check_idle()


# Time, and reasons


def test_time_decides_how_many_layers_a_piece_has_if_it_is_shorter() -> None:
    world = Recorder(layered(split_prefill_layers=8, max_step_ms=120.0, max_slowdown=-1.0))
    world.let_steps_cost(seconds)
    world.tick_s = 0.0
    for length in (30, 200, 400, 100):
        world.send([length % 250] * length, max_new_tokens=6, ignore_eos=True)
        world.run_dry(check=False)
    world.plans.clear()
    stream(world)
    id = world.send(prompt(1_000), max_new_tokens=3)
    world.run_dry(check=False)
    pieces = [plan for plan in world.plans if plan.layers is not None]
    assert len(pieces) >= 4
    taken = [seconds(plan) for plan in pieces]
    assert max(taken) <= 0.13
    told = str(explain(world.scheduler, id, world.time))
    assert "layers: computes" in told
    assert "(the time of a step)" in told
    world.check_outputs()


def test_the_option_decides_where_time_allows_more() -> None:
    world = Recorder(layered(max_step_ms=5_000.0))
    world.let_steps_cost(seconds)
    stream(world)
    id = world.send(prompt(60), max_new_tokens=3)
    world.run_dry(check=False)
    assert spans(world)[0] == (0, 3)
    told = str(explain(world.scheduler, id, world.time))
    assert "layers: computes 6 to 8 of 8, for its tokens 0 to 60 (--split-prefill-layers)" in told


def test_waiting_behind_an_open_prefill_is_a_reason() -> None:
    world = World(layered())
    stream(world)
    world.send(prompt(700), max_new_tokens=3)
    world.step()
    waits = world.send(prompt(100, first=99), max_new_tokens=3)
    world.step()
    world.step()
    told = str(explain(world.scheduler, waits, world.time))
    assert "the layers of other prompts are computed piece by piece" in told
    assert any(one.stop is Stop.LAYERS for one in world.scheduler.history._passes)


def test_layers_cannot_be_counted_without_the_models() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        settings(split_prefill_layers=2)


def test_prefills_of_layers_that_keep_a_state_are_not_split() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        layered(states=StateSettings(num_slots=20))


def test_a_span_says_which_part_of_the_work_it_is() -> None:
    span = LayerSpan(2, 4, 8)
    assert (span.is_first, span.is_last, span.part) == (False, False, 0.25)


# Random schedules


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of random worlds are short: let pieces be worth a step nevertheless."""
    monkeypatch.setattr(SplitPlanner, "least_tokens", 1)


NUM_SCHEDULES = 6


@cache
def schedule(seed: int) -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_random(seed, splits=True, windows=seed % 3 == 1, switches=seed % 5 == 0)
    stats = world.scheduler.stats()
    if seed % 4 == 0:
        world.replay(check=True)
    passes = world.scheduler.history._passes
    return Counter(
        {
            "pieces": stats.total_split_steps,
            "retractions": stats.total_retractions,
            "aborts": stats.total_aborted,
            "waits": sum(one.stop is Stop.LAYERS for one in passes),
        }
    )


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES, 24))
def test_random_schedules_keep_every_invariant_and_are_replayed(seed: int) -> None:
    schedule(seed)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", every_second([401, 403]))
def test_a_journal_may_be_put_aside_between_pieces(seed: int) -> None:
    run_random(seed, 12, splits=True, puts_aside=True).replay(check=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_prompts_cut_by_time_are_split_too(seed: int) -> None:
    run_timed(seed, splits=True)


@pytest.mark.usefixtures("small_pieces")
def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, range(NUM_SCHEDULES)), Counter[str]())
    assert reached["retractions"], reached
    assert all(reached[what] >= 5 for what in ("pieces", "aborts", "waits")), reached
