"""KV that is stored outside of the pool: whatever the store does, every invariant holds, no answer
differs, and nobody waits for longer than is allowed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.scheduler.groups import find_transfers
from tests.scheduler.host_oracle import OracleCopies, OracleHost
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.tier_oracle import Blocks
from tests.scheduler.tiered_world import TieredWorld, run, run_tiered, small_world
from tests.seeds import seeds, slow
from weft.engine.tiers.store import HUNG_S
from weft.engine.tiers.writes import WRITE_BYTES
from weft.memory.tiers.protocol import Sought
from weft.messages.cache import (
    ClearCache,
    ClearCacheReply,
    GetCache,
    GetCacheReply,
    SaveCache,
    SaveCacheReply,
)
from weft.messages.control import FlushCache
from weft.messages.requests import Abort
from weft.messages.sessions import OpenSession, SessionParams
from weft.messages.weights import (
    UpdateWeightsFromDisk,
)

# The last are seeds of worlds in which a read is given up, which few of them are.
SCHEDULES = (4, 10, 12, 17, 54, 108)


@cache
def schedule(seed: int) -> Counter[str]:
    """What both schedules of a seed reach, in which every invariant has been checked."""
    reached = Counter[str]()
    for world in run_tiered(seed):
        world.replay(check=seed % 3 == 0)
        reached["read"] += world.tiers.num_read
        reached["landed"] += world.service._reads.num_landed
        reached["written"] += world.tiers.num_written
        reached["faults"] += world.tiers.num_faults
        reached["silent"] += world.tiers.num_silent
        reached["retractions"] += world.scheduler.stats().total_retractions
        reached["lost pages"] += len(world.scheduler.kv.allocator.quarantined)
    return reached


LAYERS = [{"windows": True}, {"states": True}, {"draft": True}]


@pytest.mark.parametrize("layers", LAYERS, ids=["windows", "states", "draft"])
@pytest.mark.parametrize("seed", [600, *slow([603, 604])])
def test_whatever_the_store_does_with_resume_states_every_invariant_holds(
    seed: int, layers: dict[str, bool]
) -> None:
    for world in run_tiered(seed, 24, pins=seed % 2 == 0, **layers):
        world.replay(check=seed % 3 == 0)


@pytest.mark.parametrize(
    "seed", [*SCHEDULES, *slow([*range(4), *range(5, 10), 11, *range(13, 17)])]
)
def test_invariants_hold_and_replays_are_exact_whatever_the_store_does(seed: int) -> None:
    schedule(seed)


@pytest.mark.parametrize("number", seeds(1, 4))
def test_schedules_that_nobody_has_seen_before(number: int, fresh_seed: int) -> None:
    run_tiered(fresh_seed * 1_000 + number)


# Of the slow ones some have what would be copied for ever, because others of it must go for it.
@pytest.mark.parametrize("seed", [13, *slow([2, 4, 14, 17, 23])])
def test_with_the_memory_of_the_host_every_invariant_holds(seed: int) -> None:
    for world in run_tiered(seed, 24, pins=seed % 2 == 0, host=True):
        world.replay(check=seed % 3 == 0)


def test_what_would_drive_out_each_other_is_copied_to_the_host_once() -> None:
    world = small_world()
    copies = OracleCopies(4, 2, "")  # two blocks
    store = OracleHost(copies, 4, 2, 1.0, "", None)
    copies.fails = False
    tiers = replace(world.settings.tiers, saves_evicted=True)
    world = TieredWorld(replace(world.settings, num_pages=24, tiers=tiers), 0, store)
    world.step()
    for first in (10, 60):
        run(world, list(range(first, first + 17)))
    for _ in range(60):
        world.step()
    assert not world.service.feature.worthy
    num_written = store.num_written
    assert num_written > 0
    for _ in range(60):
        world.step()
    assert store.num_written == num_written


def test_what_will_be_evicted_is_copied_to_the_host_whenever_memory_gets_short() -> None:
    world = small_world()
    copies = OracleCopies(200, 2, "")
    copies.fails = False
    store = OracleHost(copies, 4, 2, 1.0, "", None)
    tiers = replace(world.settings.tiers, saves_evicted=True)
    world = TieredWorld(replace(world.settings, num_pages=64, tiers=tiers), 0, store)
    world.step()
    written = []
    for first in (10, 60, 110, 160, 210):
        run(world, list(range(first, first + 33)))
        for _ in range(60):
            world.step()
        written.append(store.num_written)
    assert written[:2] == [0, 0]  # half of the pool is free
    assert 0 < written[2] < written[3] < written[4]


@pytest.mark.parametrize("seed", [401])
def test_a_journal_may_be_put_aside_while_pages_are_on_their_way(seed: int) -> None:
    for world in run_tiered(seed, 8, puts_aside=True):
        world.replay(check=True)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, SCHEDULES), Counter[str]())
    assert reached["landed"] > 200, reached
    assert min(reached.values()) > 3, reached


# One thing after the other


def stored(prompt: list[int], **sampling: object) -> Blocks:
    """What a server has stored that got a prompt twice."""
    world = small_world()
    world.step()
    run(world, prompt, **sampling)
    assert not world.tiers.blocks
    run(world, prompt, **sampling)
    world.check_idle()
    return world.tiers.blocks


PROMPT = list(range(10, 51))


def test_a_prompt_that_was_used_twice_is_found_after_a_restart() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    assert run(world, PROMPT) == 40
    world.check_outputs()
    assert world.scheduler.stats().total_prefilled_tokens == 1
    assert world.service.numbers()["total_disk_hit_tokens"] == 40
    assert world.replay(check=True)


@pytest.mark.parametrize(
    ("write", "once", "in_a_session", "twice", "saved"),
    [
        ("selective", 0, 10, 20, 20),
        ("through", 10, 20, 20, 20),
        ("back", 0, 0, 0, 20),
        ("off", 0, 0, 0, 0),
    ],
)
def test_each_policy_writes_what_its_name_says(
    write: str, once: int, in_a_session: int, twice: int, saved: int
) -> None:
    world = small_world(write=write)
    world.step()
    num_blocks = []
    run(world, PROMPT)
    world.come_to_rest()
    num_blocks.append(len(world.tiers.blocks))
    world.tell(OpenSession(call=1, session_id="s"))
    turn = [number + 100 for number in PROMPT]
    world.send(turn, max_new_tokens=2, ignore_eos=True, session=SessionParams(id="s"))
    world.run_dry()
    world.come_to_rest()
    num_blocks.append(len(world.tiers.blocks))
    run(world, PROMPT)
    world.come_to_rest()
    num_blocks.append(len(world.tiers.blocks))
    world.tell(SaveCache(call=2, timeout_s=60.0))
    for _ in range(30):
        world.engine.step()
    num_blocks.append(len(world.tiers.blocks))
    assert num_blocks == [once, in_a_session, twice, saved]


def test_what_a_retracted_request_finds_of_its_own_was_not_used_twice() -> None:
    world = small_world(num_pages=60)
    world.step()
    for first in (10, 110):
        prompt = list(range(first, first + 20))
        world.send(prompt, max_new_tokens=70, ignore_eos=True)
    world.run_dry()
    world.come_to_rest()
    assert world.scheduler.stats().total_retractions
    assert not world.tiers.blocks


def test_writes_have_at_most_this_many_bytes() -> None:
    world = small_world(write="through", block_bytes=WRITE_BYTES // 3)
    world.step()
    world.tiers.mood = "silent"
    run(world, PROMPT)
    (transfer,) = world.transfers.table.values()
    assert (transfer.start, transfer.end) == (0, 12)
    world.tiers.let_all_end()
    world.check_idle()
    assert len(world.tiers.blocks) == 10


def test_another_salt_finds_nothing() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    assert run(world, PROMPT, salt="mine") == 0


def test_a_request_waits_no_longer_than_it_may_and_says_for_what() -> None:
    world = small_world(stored(PROMPT), wait_s=3.0)
    world.step()
    world.tiers.mood = "silent"
    id = world.send(PROMPT, max_new_tokens=1, ignore_eos=True)
    request = world.scheduler.requests[id]
    reason = world.service.feature.why_waits(request)
    assert reason.startswith("40 tokens are being read from disk, for ")
    for _ in range(310):
        world.step()
    assert world.finished[id].cached_tokens == 0
    assert world.finished[id].queue_s < 3.0 + 2 * world.tick_s
    assert world.transfers.num_owned == 20
    for _ in range(2):
        world.time += HUNG_S
        world.step()
    assert not world.transfers.table
    assert len(world.scheduler.kv.allocator.quarantined) == 20
    assert world.tiers.is_stopped
    assert run(world, PROMPT) == 40  # of memory
    world.replay(check=True)


def test_a_request_without_patience_does_not_ask() -> None:
    world = small_world(stored(PROMPT), wait_s=0.0)
    world.step()
    assert run(world, PROMPT) == 0
    assert world.tiers.num_read == 0


def test_a_request_that_comes_when_the_store_has_just_opened_finds_what_it_has() -> None:
    world = small_world(stored(PROMPT))
    assert run(world, PROMPT) == 40


def test_two_namespaces_do_not_wait_for_one_read() -> None:
    blocks = {**stored(PROMPT), **stored(PROMPT, salt="mine")}
    world = small_world(blocks)
    world.step()
    world.tiers.mood = "silent"
    for salt in ("", "mine"):
        world.send(PROMPT, max_new_tokens=2, ignore_eos=True, salt=salt)
    assert len(world.transfers.table) == 2
    world.tiers.let_all_end()
    world.run_dry()
    assert [one.cached_tokens for one in world.finished.values()] == [40, 40]


def test_a_transfer_begins_when_all_steps_that_were_planned_before_have_ended() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    world.send(PROMPT, max_new_tokens=2, ignore_eos=True)
    (transfer,) = world.transfers.table.values()
    world.transfers.begin(transfer.planned_step)
    assert not transfer.is_started
    world.transfers.begin(transfer.planned_step + 1)
    assert transfer.is_started
    world.run_dry()
    world.check_idle()


def test_stores_of_more_than_k_and_v_hear_which_pages_have_come() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    landed: list[int] = []
    world.scheduler.kv.on_landing(lambda pages: landed.extend(pages.tolist()))
    run(world, PROMPT)
    (sequence,) = world.scheduler.kv.cache.tree.sequences()
    assert landed == world.scheduler.kv.cache.match(sequence).pages[:20].tolist()


def test_nobody_waits_for_a_read_that_was_given_up() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    world.tiers.mood = "silent"
    world.send(PROMPT, max_new_tokens=2, ignore_eos=True)
    world.step()
    (given_up,) = world.transfers.table
    world.transfers.cancel(given_up, world.time)
    other = world.send([*PROMPT, 7], max_new_tokens=2, ignore_eos=True)
    assert world.service.feature.waiting[other].ticket != given_up
    world.tiers.let_all_end()
    world.run_dry()
    world.check_idle()
    world.check_outputs()


@pytest.mark.parametrize(("read_s", "found"), [(0.041, 0), (0.039, 40)])
def test_what_takes_longer_to_read_than_to_compute_is_computed(
    monkeypatch: pytest.MonkeyPatch, read_s: float, found: int
) -> None:
    world = small_world(stored(PROMPT))
    world.step()
    world.service._reads._speed.token_s = 0.001
    monkeypatch.setattr(world.tiers, "seek", lambda *asked: Sought(40, read_s))
    assert run(world, PROMPT) == found


def test_nothing_is_written_while_a_request_waits_for_the_disk() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    world.tiers.mood = "silent"
    world.send(PROMPT, max_new_tokens=1, ignore_eos=True)
    other = list(range(100, 141))
    for _ in range(2):
        world.send(other, max_new_tokens=1, ignore_eos=True)
        for _ in range(20):
            world.step()
    assert world.service.feature.waiting
    assert world.service.feature.worthy
    assert world.transfers.table.writing is None
    assert world.tiers.num_written == 0


def test_two_requests_wait_for_one_read() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    ids = [world.send([*PROMPT, last], max_new_tokens=2, ignore_eos=True) for last in range(3)]
    assert len(world.transfers.table) == 1
    world.run_dry()
    assert [world.finished[id].cached_tokens for id in ids] == [40, 40, 40]
    assert world.tiers.num_read == 40


def test_all_reads_together_take_a_quarter_of_the_pool() -> None:
    other = [number + 100 for number in PROMPT]
    world = small_world({**stored(PROMPT), **stored(other)}, num_pages=100)
    world.step()
    world.tiers.mood = "silent"
    for prompt in (PROMPT, other):
        world.send(prompt, max_new_tokens=2, ignore_eos=True)
    # 20 pages of the first prompt, and of the other one the whole blocks for which there is room.
    assert [len(one.pages) for one in world.transfers.table.values()] == [20, 4]
    world.tiers.let_all_end()
    world.run_dry()
    world.check_idle()
    world.check_outputs()


def test_a_read_goes_on_as_long_as_somebody_waits_for_it() -> None:
    world = small_world(stored(PROMPT), wait_s=3.0)
    world.step()
    world.tiers.mood = "silent"
    first = world.send(PROMPT, max_new_tokens=2, ignore_eos=True)
    world.time += 2.0
    second = world.send([*PROMPT, 7], max_new_tokens=2, ignore_eos=True)
    assert world.service.wake_at() == world.service.feature.waiting[first].until_s
    world.time += 1.5
    world.step()
    assert [*world.service.feature.waiting] == [second]
    (ticket,) = world.transfers.table
    assert not world.transfers.table[ticket].is_cancelled
    assert world.service.wake_at() == world.service.feature.waiting[second].until_s
    world.time += 2.0
    world.step()
    transfer = world.transfers.table[ticket]
    assert transfer.is_cancelled
    assert transfer.since_s > 5.0  # it has as long to end as if it had just begun
    assert world.service.wake_at() == transfer.since_s + HUNG_S
    world.tiers.let_all_end()
    world.run_dry()
    assert world.finished[first].cached_tokens == 0
    world.check_outputs()


def test_what_is_more_than_a_quarter_of_the_pool_is_read_in_parts() -> None:
    prompt = [10 + number * 7 % 250 for number in range(161)]
    blocks = stored(prompt)
    world = small_world(blocks, num_pages=120)
    world.step()
    assert run(world, prompt) == 160
    assert world.service.numbers()["total_disk_hit_tokens"] == 160
    world.check_idle()
    world.check_outputs()


def test_an_abort_while_it_waits_leaves_nothing_behind() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    id = world.send(PROMPT, max_new_tokens=2)
    world.abort(Abort(ids=(id,)))
    world.step()
    world.check_idle()
    assert run(world, PROMPT) == 40  # what was read stays for others


def test_a_flush_while_pages_are_on_their_way_forgets_them() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    world.tiers.mood = "silent"
    world.send(PROMPT, max_new_tokens=2)
    world.transfers.begin(world.scheduler.planner.num_steps)
    world.tell(FlushCache(call=7))
    assert world.scheduler.flush_cache()
    world.check()
    assert world.transfers.num_owned == 20  # a thread may still write into them
    world.tiers.let_all_end()
    world.run_dry()
    world.check_idle()
    world.check_outputs()


def test_new_weights_end_what_is_on_its_way_and_nothing_old_is_found() -> None:
    world = small_world(stored(PROMPT), write="through")
    world.step()
    run(world, list(range(100, 140)))
    world.tiers.mood = "silent"
    id = world.send(PROMPT, max_new_tokens=2, ignore_eos=True)
    world.step()
    world.tell(UpdateWeightsFromDisk(call=1, model_path="5"))
    world.step()
    world.step()
    world.tiers.let_all_end()
    world.run_dry()
    assert world.finished[id].cached_tokens == 0
    world.tiers.mood = "quick"
    assert run(world, PROMPT) == 40  # of memory
    world.come_to_rest()
    assert {weights for weights, _, _ in world.tiers.blocks} == {0, 5}
    world.tell(FlushCache(call=2))
    world.step()
    assert run(world, PROMPT) == 40
    assert world.service.numbers()["total_disk_hit_tokens"] == 40
    *_, of_memory, of_disk = world.outputs.values()
    assert of_memory == of_disk
    world.replay(check=True)


def test_all_that_is_cached_is_written_when_it_is_asked_for() -> None:
    world = small_world(write="back")
    world.step()
    run(world, PROMPT)
    run(world, PROMPT)
    assert not world.tiers.blocks
    world.tell(SaveCache(call=3, timeout_s=60.0))
    assert world.service.wake_at() == world.service._writes.saves[0].until_s
    told = [reply for _ in range(20) for reply in world.engine.step()]
    (reply,) = [one for one in told if isinstance(one, SaveCacheReply)]
    assert reply.success
    assert reply.call == 3
    assert len(world.tiers.blocks) == 10


def test_a_read_never_takes_what_running_requests_need() -> None:
    blocks = stored(PROMPT)
    world = small_world(blocks, num_pages=80)
    world.step()
    world.send(list(range(60, 70)), max_new_tokens=130, ignore_eos=True)
    world.step()
    id = world.send(PROMPT, max_new_tokens=2, ignore_eos=True)
    assert 0 < 2 * world.transfers.num_owned <= 160 - 10 - 129
    world.run_dry()
    assert world.scheduler.stats().total_retractions == 0
    assert world.finished[id].reason == "length"


def test_an_engine_without_a_store_says_so() -> None:
    settings = replace(small_world().settings, tiers=None)
    world = RecordedWorld(settings)
    assert find_transfers(world.scheduler.kv) is None
    reply = world.engine.submit(GetCache(call=1))
    assert isinstance(reply, GetCacheReply)
    assert reply.disk == "this server was started without --cache-dir"
    for call in (ClearCache(call=2), SaveCache(call=3)):
        refused = world.engine.submit(call)
        assert isinstance(refused, ClearCacheReply | SaveCacheReply)
        assert not refused.success


def test_what_is_stored_can_be_asked_for_and_removed() -> None:
    world = small_world(stored(PROMPT))
    world.step()
    run(world, PROMPT)
    reply = world.engine.submit(GetCache(call=1))
    assert isinstance(reply, GetCacheReply)
    assert (reply.prompt_tokens, reply.memory_hit_tokens, reply.disk_hit_tokens) == (41, 0, 40)
    run(world, PROMPT)
    reply = world.engine.submit(GetCache(call=2))
    assert isinstance(reply, GetCacheReply)
    assert (reply.memory_hit_tokens, reply.disk_hit_tokens) == (40, 40)
    cleared = world.engine.submit(ClearCache(call=3))
    assert isinstance(cleared, ClearCacheReply)
    assert cleared.success
    assert not world.tiers.blocks
