"""Pinned beginnings of prompts: they stay whatever else comes, within their budget and their time,
and give way only so that a request can run at all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.scheduler.random_worlds import run_random
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.tiered_world import run_tiered, small_world
from tests.scheduler.world import EOS, VOCAB
from tests.seeds import seeds, slow
from weft.engine.explain import explain
from weft.journal.replay import Replay
from weft.messages.cache import GetCache, GetCacheReply
from weft.messages.control import FlushCache, FlushCacheReply
from weft.messages.pins import PinStatus, Unpin, UnpinReply
from weft.messages.replies import CacheUsePiece
from weft.messages.requests import Abort
from weft.messages.weights import UpdateWeightsFromDisk
from weft.scheduler.settings import SchedulerSettings

PROMPT = [10 + number * 7 % 250 for number in range(101)]


def world(num_pages: int = 200, **settings: object) -> RecordedWorld:
    """400 tokens of memory, 100 of which may be pinned."""
    fields: dict[str, object] = {
        "num_pages": num_pages,
        "page_size": 2,
        "max_running_requests": 4,
        "context_length": 2 * num_pages,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        **settings,
    }
    return RecordedWorld(SchedulerSettings(**fields))  # type: ignore[arg-type]


def mark(length: int, ttl_s: float = 1e6, name: str = "") -> dict[str, object]:
    return {"length": length, "ttl_s": ttl_s, "name": name}


def run(
    world: RecordedWorld,
    prompt: list[int],
    *marks: dict[str, object],
    max_new: int = 2,
    **more: object,
) -> CacheUsePiece:
    """Run a request to its end. Returns what it got of the caches."""
    id = world.send(prompt, pins=marks, max_new_tokens=max_new, ignore_eos=True, **more)
    world.run_dry()
    if not marks:
        assert not world.given.get(id), "a request that asked for nothing is told of the caches"
        return CacheUsePiece(id=id)
    [piece] = world.given[id]
    assert isinstance(piece, CacheUsePiece)
    return piece


def cached(world: RecordedWorld, prompt: list[int], **more: object) -> int:
    """How much of a prompt is found now."""
    return world.finished[run(world, prompt, **more).id].cached_tokens


def listed(world: RecordedWorld) -> list[PinStatus]:
    reply = world.engine.submit(GetCache(call=1))
    assert isinstance(reply, GetCacheReply)
    return reply.pins


def flood(world: RecordedWorld, num_tokens: int, user: str = "") -> list[int]:
    """Send so many tokens that nobody has sent before. Returns the requests."""
    rng = random.Random(num_tokens)
    ids = []
    for _ in range(num_tokens // 60):
        prompt = [rng.randrange(VOCAB) for _ in range(50)]
        ids.append(world.send(prompt, max_new_tokens=10, ignore_eos=True, user=user))
    return ids


def test_a_pinned_prompt_survives_a_flood_of_ten_pools_and_nobody_is_refused_for_it() -> None:
    it = world()
    assert run(it, PROMPT, mark(100), user="alice").pinned_tokens == 100
    ids = [id for user in ("b", "c", "d") for id in flood(it, 4_000 // 3 + 50, user)]
    it.run_dry()
    assert {it.finished[id].reason for id in ids} == {"length"}
    assert it.scheduler.stats().total_evicted_tokens > 3_000
    assert it.scheduler.stats().total_retractions == 0
    assert cached(it, PROMPT, user="alice") == 100
    assert it.engine._engine.services.stats().pinned_tokens == 100
    it.check_idle()
    it.check_outputs()
    it.replay(check=True)


def test_a_pin_ends_with_its_time_and_lives_on_with_each_use() -> None:
    it = world()
    it.tick_s = 0.01
    run(it, PROMPT, mark(100, ttl_s=300.0))
    it.time += 200.0
    it.step()
    run(it, PROMPT, mark(100, ttl_s=300.0))
    [pin] = listed(it)
    assert pin.tokens == 100
    assert pin.state == "firm"
    assert pin.uses == 2
    assert pin.expires_in_s == pytest.approx(300.0, abs=0.1)
    it.step()
    assert it.engine.wait_s == pytest.approx(300.0, abs=0.1)
    it.time += 299.0
    it.step()
    assert len(listed(it)) == 1
    it.time += 1.0
    it.step()
    assert listed(it) == []
    assert cached(it, PROMPT) == 100  # it is still there, as any other
    flood(it, 800)
    it.run_dry()
    assert cached(it, PROMPT) < 100


def test_what_is_pinned_of_a_conversation_moves_on_with_it() -> None:
    it = world()
    run(it, PROMPT[:41], mark(20), mark(40))
    assert [pin.tokens for pin in listed(it)] == [40]
    run(it, PROMPT[:81], mark(20), mark(80))
    assert [pin.tokens for pin in listed(it)] == [80]
    run(it, PROMPT[:91], mark(20, ttl_s=2e6), mark(90))
    assert sorted(pin.tokens for pin in listed(it)) == [20, 90]


def test_a_tenant_displaces_its_own_pins_and_nobody_elses() -> None:
    it = world(tenant_cache="bob=0.5")
    run(it, PROMPT[:61], mark(60), user="alice")
    other = list(reversed(PROMPT))
    assert run(it, other[:41], mark(40), user="bob").pinned_tokens == 40
    refused = run(it, other[40:101], mark(60), user="bob")
    assert refused.pinned_tokens == 0
    assert refused.why == "60 tokens are more than the 50 that may be pinned"
    assert run(it, other[41:82], mark(40), user="bob").pinned_tokens == 40
    assert [(pin.tenant, pin.tokens) for pin in listed(it)] == [("alice", 60), ("bob", 40)]
    assert run(it, other[30:81], mark(50), user="carol").why == (
        "100 of the 100 tokens that may be are pinned"
    )
    assert it.engine._engine.services.stats().total_pins_refused == 2


@pytest.mark.parametrize(("max_pinned", "pinned"), [(0.0, 0), (0.1, 20), (0.5, 60)])
def test_pins_take_no_more_than_their_part_of_the_memory(max_pinned: float, pinned: int) -> None:
    it = world(max_pinned=max_pinned)
    assert run(it, PROMPT, mark(20), mark(60)).pinned_tokens == pinned


def test_of_several_marks_the_longest_that_has_room_is_pinned() -> None:
    it = world()
    piece = run(it, [*PROMPT, *PROMPT[:50]], mark(60), mark(120))
    assert piece.pinned_tokens == 60
    assert piece.why == "120 tokens are more than the 100 that may be pinned"


def test_a_pin_with_a_name_is_not_displaced_and_can_be_let_go() -> None:
    it = world()
    run(it, PROMPT[:81], mark(80, name="manual"))
    other = list(reversed(PROMPT))
    assert run(it, other[:41], mark(40)).pinned_tokens == 0
    reply = it.engine.submit(Unpin(name="manual"))
    assert reply == UnpinReply(success=True, tokens=80)
    assert it.scheduler.kv.cache.protected_pages == 0
    missing = it.engine.submit(Unpin(name="manual"))
    assert missing == UnpinReply(success=False, message="there is no pin 'manual'")


def test_a_pin_gives_way_so_that_a_request_can_run_and_comes_back() -> None:
    it = world()
    run(it, PROMPT, mark(100))
    id = it.send(list(range(3, 253)), max_new_tokens=149, ignore_eos=True)
    it.run_dry()
    assert it.finished[id].reason == "length"
    [pin] = listed(it)
    assert pin.state == "its memory was needed"
    stats = it.engine._engine.services.stats()
    assert stats.num_pins == 1
    assert stats.pinned_tokens == 0
    assert stats.total_pins_given_way == 1
    assert cached(it, PROMPT) < 100
    it.step()
    assert [one.state for one in listed(it)] == ["firm"]
    it.check_idle()
    it.check_outputs()
    it.replay(check=True)


def test_a_request_that_only_fits_without_pins_waits_until_it_is_alone() -> None:
    it = world()
    run(it, PROMPT, mark(100))
    running = it.send(list(range(20)), max_new_tokens=40, ignore_eos=True)
    it.step()
    large = it.send(list(range(3, 293)), max_new_tokens=20, ignore_eos=True)
    while running not in it.finished:
        it.step()
        assert [pin.state for pin in listed(it)] == ["firm"]
    it.run_dry()
    assert it.finished[large].reason == "length"
    it.check_outputs()


def test_a_pin_that_has_given_way_in_vain_is_firm_again_when_nothing_runs() -> None:
    it = world()
    run(it, PROMPT, mark(100))
    id = it.send(list(range(3, 293)), max_new_tokens=100, ignore_eos=True)
    while it.scheduler.kv.pins.num_given_way == 0:
        it.step()
    it.abort(Abort(ids=(id,)))
    it.run_dry()
    it.step()
    assert it.scheduler.kv.pins.num_given_way == 1


def test_an_abort_before_the_prompt_is_computed_pins_nothing() -> None:
    it = world(chunked_prefill_size=10)
    id = it.send(PROMPT, pins=[mark(100)], max_new_tokens=5)
    for _ in range(3):
        it.step()
    it.abort(Abort(ids=(id,)))
    it.run_dry()
    assert listed(it) == []
    [piece] = it.given[id]
    assert isinstance(piece, CacheUsePiece)
    assert piece.why == "its KV is not in the cache"
    it.check_idle()


def test_a_flush_and_new_weights_take_the_kv_and_leave_the_pin() -> None:
    it = world()
    run(it, PROMPT, mark(100, name="p"))
    it.engine.submit(FlushCache(call=7))
    replies = it.engine.step()
    assert FlushCacheReply(call=7, success=True) in replies
    assert [pin.state for pin in listed(it)] == ["the cache was emptied"]
    assert cached(it, PROMPT) == 0
    it.step()
    assert [pin.state for pin in listed(it)] == ["firm"]
    it.tell(UpdateWeightsFromDisk(call=1, model_path="5"))
    it.step()
    it.step()
    it.step()
    assert [pin.state for pin in listed(it)] == ["the cache was emptied"]
    assert run(it, PROMPT, mark(100, name="p")).pinned_tokens == 100
    it.replay(check=True)


def test_the_history_of_a_request_says_what_was_pinned() -> None:
    it = world()
    for length in (1, 100):
        piece = run(it, PROMPT, mark(length))
        found = explain(it.scheduler, piece.id, it.time)
        assert found is not None
        told = [entry.what for entry in found.timeline if "pinned" in entry.what]
        assert len(told) == 1, found.timeline
    assert "its first 100 tokens are pinned" in told[0]


def test_a_request_that_asks_is_told_what_was_read_for_it() -> None:
    before = small_world()
    before.step()
    run(before, PROMPT[:41], mark(40))
    before.check_idle()
    assert len(before.tiers.blocks) == 10  # a pin is written at once
    after = small_world(before.tiers.blocks)
    after.step()
    piece = run(after, PROMPT[:41], mark(40))
    assert piece.disk_tokens == 40
    assert piece.pinned_tokens == 40
    assert run(after, PROMPT[:41], mark(40)).disk_tokens == 0


def test_with_a_store_a_pin_comes_back_by_itself() -> None:
    it = small_world()
    it.step()
    run(it, PROMPT[:43], mark(42))
    it.come_to_rest()
    it.tell(FlushCache(call=7))
    it.step()
    assert [pin.state for pin in listed(it)] == ["the cache was emptied"]
    service = it.engine._engine.services.pins
    assert service.wake_at() <= it.time  # also where no request comes
    for _ in range(4):
        it.step()
    assert service.wake_at() > it.time + 1e5
    assert [pin.state for pin in listed(it)] == ["firm"]
    assert it.tiers.num_read == 40
    assert [one.tokens for one in listed(it)] == [40]  # whole blocks
    assert run(it, PROMPT[:43], mark(42)).pinned_tokens == 42
    assert [one.tokens for one in listed(it)] == [42]
    it.replay(check=True)


def test_a_replay_gives_each_pin_what_was_found_for_it() -> None:
    before = small_world()
    before.step()
    run(before, PROMPT[:41], mark(40))
    before.check_idle()
    it = small_world(before.tiers.blocks, write="off")
    it.step()
    for prompt in ([7, *PROMPT], PROMPT):  # the first one is not stored
        run(it, prompt[:41], mark(40))
    it.tell(FlushCache(call=7))
    for _ in range(4):
        it.step()
    assert sorted(pin.state for pin in listed(it)) == ["firm", "the cache was emptied"]
    it.replay(check=True)


@pytest.mark.parametrize("seed", seeds(4, 16))
def test_with_pins_every_invariant_holds_and_the_replay_is_exact(seed: int) -> None:
    kinds = {"windows": seed % 8 == 1, "states": seed % 8 == 3, "drafts": seed % 8 == 5}
    it = run_random(seed, 30, pins=True, **kinds)
    if seed % 2 == 0:
        replay = Replay(it.records, check=True)
        assert replay.run(), replay.difference
        assert replay.engine.scheduler.stats() == it.scheduler.stats()


@pytest.mark.parametrize("seed", slow([501]))
def test_a_journal_may_be_put_aside_while_there_are_pins(seed: int) -> None:
    run_random(seed, 10, pins=True, puts_aside=True).replay(check=True)


@pytest.mark.parametrize("seed", [602, *slow([600, 601])])
def test_with_pins_and_a_store_every_invariant_holds(seed: int) -> None:
    for it in run_tiered(seed, pins=True):
        replay = Replay(it.records)
        assert replay.run(), replay.difference


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = Counter[str]()
    for seed in (1_007, 1_009, 1_010, 1_015, 1_028):
        it = run_random(seed, 30, pins=True)
        stats = it.engine._engine.services.stats()
        reached["refused"] += stats.total_pins_refused
        reached["given way"] += stats.total_pins_given_way
        pieces = [piece for given in it.given.values() for piece in given]
        reached["pinned"] += sum(bool(getattr(piece, "pinned_tokens", 0)) for piece in pieces)
    assert min(reached.values()) > 5, reached
    assert reached["pinned"] > 20, reached


@pytest.mark.parametrize(("name", "expected_s"), [("", 300.0), ("mine", 100.0)])
def test_a_shorter_use_shortens_only_a_pin_with_a_name(name: str, expected_s: float) -> None:
    it = world()
    it.tick_s = 0.01
    run(it, PROMPT, mark(100, ttl_s=300.0, name=name))
    run(it, PROMPT, mark(100, ttl_s=100.0, name=name))
    it.step()
    [pin] = listed(it)
    assert pin.expires_in_s == pytest.approx(expected_s, abs=1.0)


def test_pins_of_other_namespaces_are_not_covered() -> None:
    it = world()
    run(it, PROMPT[:41], mark(20), salt="one")
    run(it, PROMPT[:41], mark(40), salt="other")
    assert sorted(pin.tokens for pin in listed(it)) == [20, 40]
    run(it, PROMPT[:41], mark(40), salt="one")
    assert sorted(pin.tokens for pin in listed(it)) == [40, 40]


@pytest.mark.parametrize("seed", range(3))
def test_pins_that_come_back_stay_within_what_may_be_pinned(seed: int) -> None:
    it = world()
    rng = random.Random(seed)
    lens = [rng.randrange(40, 101, 2) for _ in range(4)]
    prompts = [[rng.randrange(VOCAB) for _ in range(length + 1)] for length in lens]
    for prompt in prompts:
        run(it, prompt, mark(len(prompt) - 1), user=f"user-{prompt[0]}")
        it.engine.submit(FlushCache())
        it.step()
    assert [pin.state == "firm" for pin in listed(it)] == [False] * len(listed(it))
    for prompt in prompts:
        run(it, prompt)
        assert it.engine._engine.services.stats().pinned_tokens <= 100
    it.step()
    pinned = [pin.tokens for pin in listed(it) if pin.state == "firm"]
    assert pinned
    assert sum(pinned) <= 100
