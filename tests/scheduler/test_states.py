"""Layers that keep a state: random schedules, and what rows and cache hold."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from tests.scheduler.accounts import audit, find_faults
from tests.scheduler.group_world import group_settings, prompt, serve_alone
from tests.scheduler.groups import states_of
from tests.scheduler.random_worlds import run_random
from tests.scheduler.world import World
from tests.seeds import chosen, every_second
from weft.engine.explain import explain
from weft.memory.accounting.audit import AccountingError
from weft.memory.prefix_cache import CacheKey
from weft.memory.states.group import NO_SLOT
from weft.messages.requests import Abort
from weft.plan.step import NO_STATE
from weft.scheduler.history import Stop
from weft.scheduler.settings import SchedulerSettings, StateSettings


def settings(num_slots: int = 40, **changes: object) -> SchedulerSettings:
    return group_settings(states=StateSettings(num_slots=num_slots), **changes)


def forget_snapshots(world: World) -> None:
    """As if others had needed all slots."""
    while states_of(world.scheduler.kv).snapshots.evict():
        pass


# Random schedules


SCHEDULES = (0, 3, 4, 7)  # `scripts/soak --schedules` has as many as there is time for


@cache
def schedule(seed: int) -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_random(seed, 25, states=True)
    stats = world.scheduler.stats()
    if seed % 4 == 0:
        world.replay(check=True)
    assert world.runner.states is not None
    passes = world.scheduler.history._passes
    return Counter(
        {
            "copies": world.runner.states.num_kept,
            "resumed": world.runner.states.num_resumed,
            "retractions": stats.total_retractions,
            "evicted states": stats.total_evicted_states,
            "slots lacked": sum(one.stop is Stop.NO_GROUP_MEMORY for one in passes),
        }
    )


@pytest.mark.parametrize("seed", chosen(SCHEDULES, range(24)))
def test_random_schedules_with_states_keep_every_invariant_and_are_replayed(seed: int) -> None:
    schedule(seed)


def test_states_go_back_to_before_wrong_drafts() -> None:
    """The oracle knows the state of each slot, and reads of a wrong one are errors."""
    num_drafts = 0
    num_wrong = 0
    for seed in range(5, 8):
        for guesses in (False, True):  # from texts, and of a second model
            world = run_random(seed, 20, states=True, drafts=not guesses, guesses=guesses)
            counts = world.scheduler.counters.drafts.values()
            num_drafts += sum(count.num_drafts for count in counts)
            num_wrong += sum(count.num_drafts - count.num_right for count in counts)
    assert num_drafts > 30
    assert num_wrong > 5


@pytest.mark.parametrize("seed", every_second([300, 302]))
def test_a_journal_with_states_may_be_put_aside_at_any_step(seed: int) -> None:
    run_random(seed, 12, states=True, puts_aside=True).replay(check=True)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, SCHEDULES), Counter[str]())
    for what in ("copies", "resumed", "retractions", "evicted states", "slots lacked"):
        assert reached[what] >= 3, reached


# The cache


def test_what_follows_an_output_is_a_hit_up_to_the_last_border() -> None:
    world = World(settings())
    first = prompt(1, 1_000)
    id = world.send(first, max_new_tokens=100, ignore_eos=True)
    world.run_dry()
    history = [*first, *world.outputs[id]]
    # 1,099 tokens have a state, the last copy of which was left behind 1,088.
    assert serve_alone(world, [*history, *prompt(2, 50)]) == 1_088


def test_the_same_prompt_again_is_a_hit_up_to_the_last_page_before_its_end() -> None:
    world = World(settings())
    first = prompt(3, 640)
    assert serve_alone(world, first) == 0
    # Its last token must be computed: the state behind all of it would be of no use.
    assert serve_alone(world, first) == 624
    assert serve_alone(world, prompt(4, 650)) == 0
    assert serve_alone(world, prompt(4, 650)) == 640


def test_a_prompt_whose_last_tokens_differ_is_a_hit_up_to_the_last_border_while_there_is_room() -> (
    None
):
    world = World(settings())
    first = prompt(31, 357)
    assert serve_alone(world, first) == 0
    # As a template does that writes the beginning of an answer otherwise once there is an answer.
    assert serve_alone(world, [*first[:350], *prompt(32, 40)]) == 320
    assert serve_alone(world, first) == 352
    states_of(world.scheduler.kv).snapshots.evict()  # the copy at the border goes first
    assert serve_alone(world, first) == 352


def test_a_prompt_of_a_few_tokens_behind_a_snapshot_spends_no_slot() -> None:
    world = World(settings())
    first = prompt(33, 330)
    serve_alone(world, first)
    before = len(states_of(world.scheduler.kv).snapshots)
    for number in range(5):
        assert serve_alone(world, [*first[:324], *prompt(40 + number, 35)]) == 320
    assert len(states_of(world.scheduler.kv).snapshots) == before


def test_an_output_that_ends_on_a_page_leaves_its_own_state() -> None:
    world = World(settings(page_size=1, num_pages=8_192))
    first = prompt(5, 70)
    id = world.send(first, max_new_tokens=20, ignore_eos=True)
    world.run_dry()
    history = [*first, *world.outputs[id]]
    # All but the last one, which no step has computed.
    assert serve_alone(world, [*history, *prompt(6, 10)]) == 89


def test_where_long_prompts_parted_the_second_leaves_a_snapshot() -> None:
    world = World(settings(chunked_prefill_size=2_048, max_prefill_tokens=2_048))
    system = prompt(7, 600)
    assert serve_alone(world, [*system, *prompt(8, 400)]) == 0
    assert serve_alone(world, [*system, *prompt(9, 400)]) == 0
    assert serve_alone(world, [*system, *prompt(10, 400)]) == 576


def test_where_short_beginnings_are_shared_no_slot_is_spent() -> None:
    world = World(settings(chunked_prefill_size=2_048, max_prefill_tokens=2_048))
    system = prompt(11, 200)
    for seed in (12, 13, 14):
        assert serve_alone(world, [*system, *prompt(seed, 400)]) == 0


def test_a_place_where_three_sequences_part_outlives_the_chunks_of_one() -> None:
    world = World(settings(num_slots=8))
    system = prompt(15, 600)
    serve_alone(world, [*system, *prompt(16, 400)])
    serve_alone(world, [*system, *prompt(17, 400)])
    # Eight slots: the chunks of long prompts go before places where others part.
    for seed in (18, 19):
        serve_alone(world, prompt(seed, 1_500))
    assert serve_alone(world, [*system, *prompt(20, 100)]) >= 512


def test_samples_of_one_prompt_begin_behind_its_snapshot() -> None:
    world = World(settings())
    first = prompt(21, 700)
    ids = [world.send(first, max_new_tokens=8, ignore_eos=True) for _ in range(6)]
    world.run_dry()
    found = sorted(world.finished[id].cached_tokens for id in ids)
    # Those that waited for the first one's copy at a border find the one behind it, too.
    assert found == [0, 640, 688, 688, 688, 688]
    world.check_outputs()


def test_short_equal_prompts_run_in_one_step() -> None:
    world = World(settings())
    for _ in range(6):
        world.send(prompt(22, 20), max_new_tokens=8, ignore_eos=True)
    world.step()
    world.step()
    assert world.scheduler.stats().num_running == 6
    world.run_dry()


def test_sessions_in_turns_find_their_states_at_sixty_percent_of_the_slots() -> None:
    num_sessions = 8
    world = World(settings(num_slots=num_sessions * 5 // 3 + 1))
    histories = [prompt(30 + i, 300) for i in range(num_sessions)]
    found = 0
    could_be = 0
    for turn in range(6):
        for i, history in enumerate(histories):
            before = len(history)
            history += prompt(100 * turn + i, 30)
            id = world.send(list(history), max_new_tokens=100, ignore_eos=True)
            world.run_dry(check=False)
            if turn:
                found += world.finished[id].cached_tokens
                could_be += before // 64 * 64
            history += world.outputs[id]
        world.check()
    assert found >= 0.9 * could_be, (found, could_be)


def test_a_retracted_request_goes_on_behind_its_last_copy() -> None:
    world = World(settings())
    id = world.send(prompt(40, 200), max_new_tokens=200, ignore_eos=True)
    for _ in range(100):
        world.step(check=False)
    request = world.request(id)
    num_computed = int(world.scheduler.kv.columns.kv_len[request.row])
    world.scheduler.retract(request)
    world.step()
    assert request.retractions == 1
    assert request.prefix.length == num_computed // 64 * 64 == 256
    world.run_dry()
    world.check_outputs()


def test_a_row_keeps_its_state_though_all_snapshots_go() -> None:
    world = World(settings())
    first = prompt(50, 800)
    serve_alone(world, first)
    id = world.send([*first, *prompt(51, 100)], max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        world.step()
        forget_snapshots(world)
    world.abort(Abort(ids=(id,)))
    world.run_dry()
    world.check_idle()


def test_of_a_pinned_sequence_the_last_snapshot_stays() -> None:
    world = World(settings())
    first = prompt(55, 700)
    serve_alone(world, first)
    states = states_of(world.scheduler.kv)
    assert len(states.snapshots) > 2
    packed = np.array(first, dtype=np.int32).tobytes()
    pin = world.scheduler.kv.pins.keep("a session", CacheKey("", packed))
    forget_snapshots(world)
    assert len(states.snapshots) == 1
    assert serve_alone(world, [*first, *prompt(56, 20)]) == 688
    pin.drop()
    forget_snapshots(world)
    assert len(states.snapshots) == 0


def test_an_emptied_cache_gives_all_slots_back() -> None:
    world = World(settings())
    serve_alone(world, prompt(52, 900))
    states = states_of(world.scheduler.kv)
    assert len(states.snapshots) > 0
    assert world.scheduler.flush_cache()
    assert states.allocator.num_free == 40


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    world = World(settings(prefix_cache=False))
    assert serve_alone(world, prompt(53, 900)) == 0
    assert serve_alone(world, prompt(53, 900)) == 0
    assert world.runner.states is not None
    assert world.runner.states.num_kept == 0
    assert states_of(world.scheduler.kv).allocator.num_free == 40
    world.check_outputs()


# Slots that run out, and faults


def test_a_request_that_waits_for_a_slot_is_told_so() -> None:
    world = World(settings(num_slots=2))
    ids = [world.send(prompt(60 + i, 100), max_new_tokens=50) for i in range(4)]
    for _ in range(6):
        world.step()
    waiting = [id for id in ids if id in world.scheduler.requests and world.request(id).row < 0]
    assert len(waiting) == 2
    told = explain(world.scheduler, waiting[0], world.time)
    assert "no slot for a state" in str(told)
    stats = world.scheduler.stats()
    assert 2 <= stats.state_slots_used <= stats.state_slots == 2
    world.run_dry()
    world.check_outputs()


def test_two_slots_serve_a_conversation() -> None:
    world = World(settings(num_slots=2))
    history = prompt(61, 300)
    for turn in range(4):
        id = world.send(list(history), max_new_tokens=80, ignore_eos=True)
        world.run_dry()
        if turn:
            assert world.finished[id].cached_tokens >= 256
        history += [*world.outputs[id], *prompt(70 + turn, 20)]
    world.check_outputs()


def test_a_request_that_fails_leaves_no_state() -> None:
    world = World(settings(page_size=1, num_pages=8_192))
    id = world.send(prompt(63, 70), max_new_tokens=20, ignore_eos=True)
    world.step()
    # It is in the cache, and computes no token beyond that.
    world.scheduler.merge_last_batch()
    world.scheduler.fail(id, "it went wrong")
    world.run_dry()
    audit(world.scheduler)
    assert len(states_of(world.scheduler.kv).snapshots) == 0


def test_an_audit_names_the_owners_of_every_slot() -> None:
    world = World(settings())
    serve_alone(world, prompt(62, 500))
    states = states_of(world.scheduler.kv)
    slot = int(states.snapshots.owned_slots()[0])
    states.allocator.free(np.array([slot], dtype=np.int32))
    with pytest.raises(AccountingError, match=f"state page {slot} .* free list and the prefix"):
        audit(world.scheduler)
    world.scheduler.kv.accounts.quarantine(find_faults(world.scheduler))
    world.scheduler.flush_cache()
    audit(world.scheduler)
    assert states.allocator.quarantined == {slot}
    assert world.scheduler.stats().state_slots == 39


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="2 are needed"):
        settings(num_slots=1)


def test_memory_and_plans_mean_the_same_by_no_state() -> None:
    assert NO_SLOT == NO_STATE
