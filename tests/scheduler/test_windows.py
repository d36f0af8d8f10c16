"""Layers with windows that have pages of their own: random schedules, and what rows and cache
hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.scheduler.accounts import audit, find_faults
from tests.scheduler.group_world import CHUNK, group_settings, prompt, serve_alone
from tests.scheduler.groups import windows_of
from tests.scheduler.random_worlds import run_random
from tests.scheduler.world import World
from tests.seeds import chosen, every_second
from weft.arrays import IntArray
from weft.config.windows import KvPools
from weft.engine.explain import explain
from weft.memory.accounting.audit import AccountingError
from weft.messages.requests import Abort
from weft.scheduler.history import Stop
from weft.scheduler.kv import KvMemory
from weft.scheduler.settings import SchedulerSettings, WindowSettings

WINDOW = 64


def settings(**changes: object) -> SchedulerSettings:
    windows = WindowSettings(window=WINDOW, num_pages=64)
    return group_settings(**{"windows": windows, **changes})


def held_tokens(world: World, id: int) -> int:
    """Tokens that a request holds in its windows."""
    kv = world.scheduler.kv
    row = world.request(id).row
    return len(windows_of(kv).pages_of(row, int(kv.columns.kv_len[row]))) * kv.page_size


# Random schedules


SCHEDULES = (1, 2, 3, 4, 7)  # `scripts/soak --schedules` has as many as there is time for


@cache
def schedule(seed: int) -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_random(seed, windows=True)
    stats = world.scheduler.stats()
    if seed % 4 == 0:
        world.replay(check=True)
    passes = world.scheduler.history._passes
    return Counter(
        {
            "hits": stats.total_cached_tokens,
            "retractions": stats.total_retractions,
            "evicted tails": stats.total_evicted_window_tokens,
            "evicted pages": stats.total_evicted_tokens,
            "windows lacked": sum(one.stop is Stop.NO_GROUP_MEMORY for one in passes),
            "memory lacked": sum(one.stop is Stop.NO_TOKEN for one in passes),
        }
    )


@pytest.mark.parametrize("seed", chosen(SCHEDULES, range(24)))
def test_random_schedules_with_windows_keep_every_invariant_and_are_replayed(seed: int) -> None:
    schedule(seed)


@pytest.mark.parametrize("seed", every_second([300, 302]))
def test_a_journal_with_windows_may_be_put_aside_at_any_step(seed: int) -> None:
    run_random(seed, 12, windows=True, puts_aside=True).replay(check=True)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, SCHEDULES), Counter[str]())
    for what in (
        "hits",
        "retractions",
        "evicted tails",
        "evicted pages",
        "windows lacked",
        "memory lacked",
    ):
        assert reached[what] >= 2, reached


# Rows


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_holds_its_window_and_the_step_however_long_it_gets(page_size: int) -> None:
    num_pages = 16_384 // page_size
    windows = WindowSettings(window=WINDOW, num_pages=1_024 // page_size)
    world = World(settings(page_size=page_size, num_pages=num_pages, windows=windows))
    id = world.send(prompt(1, 4_096), max_new_tokens=100, ignore_eos=True)
    most = 0
    while id not in world.finished:
        world.step(check=False)
        if id in world.scheduler.requests and world.request(id).row >= 0:
            most = max(most, held_tokens(world, id))
    assert most <= WINDOW + CHUNK + 2 * page_size
    assert world.runner.windows is not None
    assert world.runner.windows.most_read >= WINDOW  # the oracle has looked at whole windows
    world.check_outputs()


def test_a_decoding_row_holds_its_window_and_two_pages() -> None:
    world = World(settings())
    id = world.send(prompt(2, 300), max_new_tokens=200, ignore_eos=True)
    for _ in range(60):
        world.step(check=False)
    assert held_tokens(world, id) <= WINDOW + 2 * 16
    assert windows_of(world.scheduler.kv).pool.num_owned * 16 == held_tokens(world, id)


@pytest.mark.parametrize("window", [32, 33, 34])
def test_before_the_next_step_a_row_gives_back_what_its_last_page_border_does_not_see(
    window: int,
) -> None:
    world = World(settings(windows=WindowSettings(window=window, num_pages=64)))
    id = world.send(prompt(2, 300), max_new_tokens=200, ignore_eos=True)
    kv = world.scheduler.kv
    windows = windows_of(kv)
    freed = 0
    for _ in range(60):
        world.step(check=False)
        before = windows.available
        row = world.request(id).row
        assert kv.room.decode_fits(np.array([row], dtype=np.int32))
        freed += windows.available - before
        border = (int(kv.columns.kv_len[row]) - 1) // 16 * 16
        assert windows.first[row] == (border - window + 1) // 16 * 16
    assert freed >= 2 * 16


def test_the_same_bytes_admit_three_times_the_requests() -> None:
    # Gemma 3: five of six layers have a window. A token takes 1 byte in each layer.
    one_pool = 8_192
    pools = KvPools(
        bytes_per_token=1, page_size=16, window=WINDOW, window_bytes=5, least=320, ratio=0.12
    )
    tokens = pools.fitting(6 * one_pool)
    windows = WindowSettings(window=WINDOW, num_pages=pools.window_tokens(tokens) // 16)
    both = World(settings(num_pages=tokens // 16, windows=windows, context_length=2_048))
    alone = World(settings(num_pages=one_pool // 16, windows=None, context_length=2_048))
    most = []
    for world in (both, alone):
        for i in range(32):
            world.send(prompt(i, 16 * WINDOW), max_new_tokens=300, ignore_eos=True)
        most.append(0)
        while world.has_work:
            world.step(check=False)
            most[-1] = max(most[-1], world.scheduler.stats().num_running)
    assert most[0] >= 3 * most[1], most


# The cache


def test_what_follows_a_cached_end_is_a_hit() -> None:
    world = World(settings())
    first = prompt(3, 1_000)
    assert serve_alone(world, first) == 0
    assert serve_alone(world, [*first, *prompt(4, 50)]) == 992
    # The last page of the same prompt must be computed again: an end has a page more.
    assert serve_alone(world, first[:992]) == 976


def test_a_prompt_that_parts_from_another_finds_its_window_while_there_is_memory() -> None:
    world = World(settings())
    system = prompt(5, 600)
    assert serve_alone(world, [*system, *prompt(6, 400)]) == 0
    assert serve_alone(world, [*system, *prompt(7, 400)]) == 592


def test_where_prompts_parted_a_window_is_left_by_the_second() -> None:
    world = World(settings())
    system = prompt(8, 600)
    serve_alone(world, [*system, *prompt(9, 400)])
    windows = windows_of(world.scheduler.kv)
    windows.tails.evict(windows.pool.allocator.num_pages)  # as if others had needed all of it
    assert serve_alone(world, [*system, *prompt(10, 400)]) == 0
    # It went on behind the place where they part, and so left the window before it.
    windows.tails._evict_of(windows.tails.spare, windows.pool.allocator.num_pages)
    assert serve_alone(world, [*system, *prompt(11, 400)]) == 592


def test_a_match_goes_only_as_far_as_a_window_is_there() -> None:
    world = World(settings())
    first = prompt(12, 500)
    serve_alone(world, first)
    longer = [*first, *prompt(13, 500)]
    serve_alone(world, longer)
    tails = windows_of(world.scheduler.kv).tails
    # The newest end is the last one that goes: take it away by itself.
    node, _ = next(reversed(tails.ends.items()))
    tails.removed(node)
    cached = serve_alone(world, [*longer, *prompt(14, 30)])
    assert 0 < cached < 992


@pytest.mark.parametrize("turns", [6])
def test_sessions_in_turns_find_their_windows_at_sixty_percent_of_the_pool(turns: int) -> None:
    num_sessions = 8
    span = WINDOW // 16
    # What all ends keep is three fifths of the pool; a step of a prompt has to fit besides.
    num_pages = num_sessions * (span + 1) * 5 // 3
    world = World(
        settings(
            chunked_prefill_size=32,
            max_prefill_tokens=32,
            windows=WindowSettings(window=WINDOW, num_pages=num_pages),
        )
    )
    histories = [prompt(20 + i, 200) for i in range(num_sessions)]
    found = 0
    could_be = 0
    for turn in range(turns):
        for i, history in enumerate(histories):
            id = world.send(history, max_new_tokens=20, ignore_eos=True)
            world.run_dry(check=False)
            finish = world.finished[id]
            if turn:
                found += finish.cached_tokens
                could_be += (len(history) - 30) // 16 * 16
            history += [*world.outputs[id], *prompt(100 * turn + i, 30)]
        world.check()
    assert found >= 0.9 * could_be, (found, could_be)


def test_a_row_keeps_its_window_though_its_tail_is_evicted_and_its_node_split() -> None:
    world = World(settings())
    first = prompt(30, 800)
    serve_alone(world, first)
    id = world.send([*first, *prompt(31, 100)], max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        world.step()
    assert world.request(id).prefix.length >= 784
    windows = windows_of(world.scheduler.kv)
    windows.tails.evict(windows.pool.allocator.num_pages)
    other = world.send([*first[:400], *prompt(32, 100)], max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        world.step()
    windows.tails.evict(windows.pool.allocator.num_pages)
    world.abort(Abort(ids=(other,)))
    world.run_dry()
    world.check_outputs()
    world.check_idle()


def test_an_emptied_cache_gives_all_windows_back() -> None:
    world = World(settings())
    serve_alone(world, prompt(40, 900))
    windows = windows_of(world.scheduler.kv)
    assert windows.pool.evictable_pages > 0
    assert world.scheduler.flush_cache()
    assert windows.pool.allocator.num_free == windows.pool.allocator.num_pages


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    world = World(settings(prefix_cache=False))
    assert serve_alone(world, prompt(41, 900)) == 0
    assert serve_alone(world, prompt(41, 900)) == 0
    pool = windows_of(world.scheduler.kv).pool
    assert pool.allocator.num_free == pool.allocator.num_pages
    world.check_outputs()


# Memory that runs out, and faults


def test_a_request_that_waits_for_windows_is_told_so() -> None:
    windows = WindowSettings(window=WINDOW, num_pages=24)
    world = World(settings(windows=windows, chunked_prefill_size=128))
    ids = [world.send(prompt(50 + i, 200), max_new_tokens=150) for i in range(6)]
    for _ in range(12):
        world.step()
    waiting = [id for id in ids if id in world.scheduler.requests and world.request(id).row < 0]
    assert waiting
    told = explain(world.scheduler, waiting[0], world.time)
    assert told is not None
    assert "no KV memory of layers with windows" in str(told)
    stats = world.scheduler.stats()
    assert 0 < stats.kv_window_used <= stats.kv_window_tokens == 24 * 16
    world.run_dry()
    world.check_outputs()


def test_an_audit_counts_the_users_of_every_page() -> None:
    world = World(settings())
    serve_alone(world, prompt(60, 500))
    pool = windows_of(world.scheduler.kv).pool
    page = int(np.flatnonzero(pool.kept)[0])
    pool.kept[page] += 1
    with pytest.raises(AccountingError, match=f"window page {page} .* tails"):
        audit(world.scheduler)
    faults = find_faults(world.scheduler)
    world.scheduler.kv.accounts.quarantine(faults)
    world.scheduler.flush_cache()
    audit(world.scheduler)
    assert pool.allocator.quarantined == {page}


@pytest.mark.parametrize("chunk_len", [CHUNK, 0])
def test_every_window_page_out_of_use_is_out_of_the_capacity(chunk_len: int) -> None:
    """`chunk_len` 0: prompts are never cut."""
    windows = WindowSettings(window=WINDOW, num_pages=24)
    world = World(settings(windows=windows, chunked_prefill_size=chunk_len))
    kv = world.scheduler.kv
    least = windows.least_pages(kv.page_size, chunk_len)
    in_pool = kv.allocator.num_pages * kv.page_size
    allocator = windows_of(kv).pool.allocator
    for num_left in reversed(range(24)):
        allocator.quarantine(int(allocator.free_pages()[0]), is_owned=False)
        in_windows = num_left * kv.page_size
        assert world.scheduler.stats().kv_window_tokens == in_windows
        if not chunk_len:
            assert kv.room.capacity == min(in_pool, in_windows)
        elif num_left >= least:
            assert kv.room.capacity == in_pool
        else:
            assert kv.room.capacity == 0


def test_pages_too_few_for_a_request_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="20 are needed"):
        settings(windows=WindowSettings(window=WINDOW, num_pages=19))
    assert settings(windows=WindowSettings(window=WINDOW, num_pages=20)).windows is not None


def test_settings_without_windows_have_one_pool() -> None:
    world = World(replace(settings(), windows=None))
    assert not world.scheduler.kv.groups
    serve_alone(world, prompt(70, 300))
    assert world.scheduler.stats().kv_window_tokens == 0


def lacking(kv: KvMemory, rows: IntArray, num_ahead: int) -> int:
    """The specification of `KvMemory.lacking`, row by row."""
    missing = []
    next_tokens = kv.room.decode_pages(rows) * kv.page_size
    windows = windows_of(kv)
    in_all = 0
    in_windows = 0
    for row in rows.tolist():
        kv_len = int(kv.columns.kv_len[row])
        held = kv_len - int(windows.first[row])
        in_all += num_ahead
        in_windows += min(num_ahead, max(windows.full_row - held, 0))
    for wanted, free in ((in_all, kv.room.rest), (in_windows, windows.available)):
        missing.append(max(wanted, next_tokens) - free)
    return max(missing)


@pytest.mark.parametrize(("num_pages", "num_window_pages"), [(1_024, 24), (80, 400), (90, 24)])
def test_what_is_missing_is_missing_in_the_pool_that_has_less(
    num_pages: int, num_window_pages: int
) -> None:
    windows = WindowSettings(window=WINDOW, num_pages=num_window_pages)
    world = World(settings(num_pages=num_pages, windows=windows, context_length=1_024))
    ids = [
        world.send(prompt(i, 20 + 31 * i), max_new_tokens=200, ignore_eos=True) for i in range(5)
    ]
    kv = world.scheduler.kv
    found = set()
    for _ in range(120):
        world.step()
        running = [world.request(id).row for id in ids if id in world.scheduler.requests]
        rows = np.array([row for row in running if row >= 0], dtype=np.int32)
        for num_ahead in (0, 1, 20, 200):
            expected = lacking(kv, rows, num_ahead)
            assert kv.room.lacking(rows, num_ahead) == expected
            found.add(expected)
    assert len(found) > 20
    world.run_dry()
    world.check_outputs()


def test_a_long_answer_needs_a_window_and_not_its_length() -> None:
    windows = WindowSettings(window=WINDOW, num_pages=24)
    world = World(settings(windows=windows))
    for i in range(3):
        world.send(prompt(i, 16), max_new_tokens=1_000, ignore_eos=True)
    world.step()
    world.step()
    assert world.scheduler.stats().num_running == 3
    world.run_dry()
    assert world.scheduler.stats().total_retractions == 0
    world.check_outputs()
