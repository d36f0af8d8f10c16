"""KV that is lent to another server, or comes from one: whatever the other one does, every
invariant holds, no answer differs, and nobody waits for longer than is allowed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest

from tests.scheduler.groups import find_transfers
from tests.scheduler.handoff_oracle import OracleHandoff
from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.random_worlds import (
    drive,
    journal_of_failure,
    random_settings,
    with_states,
    with_windows,
)
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import EOS, VOCAB
from tests.seeds import seeds
from weft.engine import explain
from weft.engine.handoff.pulling import HUNG_S, PullService
from weft.memory.handoff.protocol import RoomAddress
from weft.memory.prefix_cache import CacheKey
from weft.messages.codec import ToEngine
from weft.messages.control import FlushCache, SetPolicy
from weft.messages.handoff import HandoffParams
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.weights import UpdateWeightsFromDisk
from weft.scheduler.settings import (
    HandoffSettings,
    SchedulerSettings,
    StateSettings,
    WindowSettings,
)
from weft.scheduler.tiers.transfers import Transfers

PROMPT = list(range(10, 51))


class HandedWorld(RecordedWorld):
    """A world with another server. Requests have a room as often as `share` says; `rooms` is how
    many there are."""

    def __init__(
        self,
        settings: SchedulerSettings,
        depth: int,
        handoff: OracleHandoff,
        fail_steps: set[int] | None = None,
        *,
        share: float = 1.0,
        rooms: int = 1 << 40,
    ) -> None:
        self._wishes = random.Random(f"rooms {share} {rooms}")
        self._share = share
        self._rooms = rooms
        self.lent_salt: str | None = None  # of prompts on the other server; None: the same as here
        super().__init__(settings, depth, fail_steps, handoff=handoff)
        self.handoff = handoff
        handoff.runner = self.runner

    def tell(self, message: ToEngine) -> None:
        if isinstance(message, GenerateRequest) and self._wishes.random() < self._share:
            room = str(message.id % self._rooms)
            address = HandoffParams(room, "there", 8998, self.lent_salt)
            message = msgspec.structs.replace(message, handoff=address)
        super().tell(message)

    @property
    def service(self):  # type: ignore[no-untyped-def]
        return self.engine._engine.services.handoff

    @property
    def leases(self):  # type: ignore[no-untyped-def]
        return self.scheduler.kv.leases

    def check_step(self) -> None:
        super().check_step()
        handoff = self.settings.handoff
        assert handoff is not None
        held = {lease.name for lease in self.leases}
        later = {lease.name for _, lease in self.service._begun} | {
            lease.name for lease in self.service.feature.begun
        }
        assert set(self.handoff.lent) <= held <= set(self.handoff.lent) | later
        told = {ended.name for ended in self.leases._ended}  # not yet to the service
        assert set(self.service.feature.lent) - told == {lease.name for lease in self.leases} - told
        lent = {page for _, pages, _ in self.handoff.lent.values() for page in pages.tolist()}
        assert self.leases.num_pages == len(lent) or later
        if len(self.leases) > 1:
            most = handoff.largest_share * self.scheduler.kv.allocator.num_pages
            assert self.leases.num_pages <= most
            most = handoff.largest_share * self.leases.resume_state_capacity
            assert self.leases.num_resume_slots <= most

    def run_dry(self, check: bool = True) -> None:
        for _ in range(1_000):
            if not self.has_work:
                return
            self.step(check)
        raise AssertionError("there is work, and nothing happens")

    def check_idle(self) -> None:
        self.handoff.let_all_end()
        transfers = find_transfers(self.scheduler.kv)
        for _ in range(100):
            if not self.leases.num_pages and not (transfers and transfers.table):
                break
            self.time += 1.0
            self.step()
        super().check_idle()


class LendingWorld(HandedWorld):
    pass


class PullingWorld(HandedWorld):
    @property
    def transfers(self) -> Transfers:
        transfers = find_transfers(self.scheduler.kv)
        assert transfers is not None
        return transfers

    def check_step(self) -> None:
        RecordedWorld.check_step(self)
        handoff = self.settings.handoff
        assert handoff is not None
        feature = self.service.feature
        for number, pull in feature.pulls.items():
            assert pull.until_s <= pull.since_s + handoff.wait_s
            # Whoever waits is let go with the first step behind its time.
            assert self.time - self.tick_s < pull.until_s
            assert all(feature.waiting[id] == number for id in pull.ids)
            assert pull.ids
        for id in feature.waiting:
            assert id in self.scheduler.requests
        assert not feature.left  # nothing is kept of those that have ended
        coming = [one for one in self.transfers.table.values()]
        assert sum(len(one.pages) for one in coming) == self.transfers.num_owned


@cache
def run_world(
    seed: int, mode: str, layers: str = "", num_requests: int = 30, *, puts_aside: bool = False
) -> HandedWorld:
    """`layers`: kinds of layers whose prompts need a resume state, "windows" or "states"."""
    rng = random.Random(f"handoff {mode} {seed}")
    settings = random_settings(random.Random(seed))
    if rng.random() < 0.6:
        settings = replace(settings, num_pages=settings.num_pages * 3)
    if layers == "windows":
        settings = with_windows(settings, rng)
    elif layers == "states":
        settings = with_states(settings, rng)
    handoff = HandoffSettings(
        mode=mode,
        lease_s=rng.choice([2.0, 10.0, 40.0]),
        wait_s=rng.choice([0.0, 5.0, 10.0, 40.0]),
        largest_share=rng.choice([0.1, 0.5, 0.5]),
    )
    settings = replace(settings, prefix_cache=True, handoff=handoff)
    other = OracleHandoff(settings.page_size, rng.choice(["quick", "slow", "moody"]), f"{seed}")
    fails = {rng.randrange(5, 200) for _ in range(3)} if seed % 5 == 0 else set()
    kind = LendingWorld if mode == "prefill" else PullingWorld
    world = kind(
        settings,
        rng.choice([0, 1, 2]),
        other,
        fails,
        share=rng.choice([0.3, 0.7, 1.0]),
        rooms=rng.choice([3, 1 << 40]),
    )
    if puts_aside:
        world.put_aside_often()
    with journal_of_failure(world, f"weft-handoff-{mode}-{seed}-"):
        drive(world, random.Random(seed), num_requests)
    return world


NUM_SCHEDULES = 3


@cache
def schedule(seed: int, mode: str, layers: str = "") -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_world(seed, mode, layers)
    world.replay(check=seed % 4 == 0)
    found = (
        Counter({f"resume states in {mode}": world.handoff.num_resume_states})
        if layers
        else Counter()
    )
    if mode == "prefill":
        lent = {"lent": world.handoff.num_lent, "expired": world.service.num_ended}
        return found + Counter(lent)
    landed = {"landed": world.service.num_landed, "dismissed": world.handoff.num_dismissed}
    return found + Counter({**world.service.num_missed, **landed})


KINDS = ["", "windows", "states"]


@pytest.mark.parametrize("layers", KINDS)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES, 16))
def test_invariants_hold_and_replays_are_exact_whatever_the_other_server_does(
    seed: int, mode: str, layers: str
) -> None:
    schedule(seed, mode, layers)


@pytest.mark.parametrize(
    ("mode", "layers"), [("prefill", ""), ("decode", "windows"), ("prefill", "states")]
)
def test_schedules_that_nobody_has_seen_before(mode: str, layers: str, fresh_seed: int) -> None:
    run_world(fresh_seed, mode, layers)


@pytest.mark.parametrize(
    ("mode", "layers"), [("prefill", "windows"), ("decode", ""), ("decode", "states")]
)
def test_a_journal_may_be_put_aside_while_pages_are_lent_or_come(mode: str, layers: str) -> None:
    run_world(403, mode, layers, 8, puts_aside=True).replay(check=True)


@pytest.mark.parametrize("layers", ["windows", "states"])
def test_resume_states_are_lent_and_come(layers: str) -> None:
    reached = Counter[str]()
    for seed in range(NUM_SCHEDULES):
        reached.update(schedule(seed, "prefill", layers))
        reached.update(schedule(seed, "decode", layers))
    assert reached["resume states in prefill"] > 0, reached
    assert reached["resume states in decode"] > 0, reached


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = Counter[str]()
    for seed in range(NUM_SCHEDULES):
        reached.update(schedule(seed, "prefill"))
        reached.update(schedule(seed, "decode"))
    assert min(reached.values()) > 0, reached
    assert {"refused", "lost", "damaged", "late", "lent", "expired", "landed"} <= set(reached)


# One thing after the other


def settings_of(handoff: HandoffSettings, num_pages: int) -> SchedulerSettings:
    return SchedulerSettings(
        num_pages=num_pages,
        page_size=2,
        max_running_requests=4,
        context_length=200,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        schedule_policy="fcfs",
        handoff=handoff,
    )


def lending(*, num_pages: int = 200, mood: str = "silent", **changed: Any) -> LendingWorld:
    settings = settings_of(HandoffSettings(mode="prefill", lease_s=5.0), num_pages)
    settings = replace(settings, **changed)
    world = LendingWorld(settings, 0, OracleHandoff(2, mood, ""))
    world.tick_s = 0.01
    return world


def pulling(
    *,
    wait_s: float = 10.0,
    fallback: str = "compute",
    num_pages: int = 200,
    mood: str = "quick",
    **changed: Any,
) -> PullingWorld:
    handoff = HandoffSettings(mode="decode", wait_s=wait_s, fallback=fallback)
    settings = replace(settings_of(handoff, num_pages), **changed)
    world = PullingWorld(settings, 0, OracleHandoff(2, mood, ""))
    world.tick_s = 0.01
    return world


def story(world: RecordedWorld, id: int) -> str:
    trace = world.scheduler.history.trace(id)
    assert trace is not None
    return "\n".join(event.detail for event in trace.events)


def test_a_prompt_is_lent_until_its_lease_is_over() -> None:
    world = lending()
    id = world.send(PROMPT, max_new_tokens=0)
    world.run_dry()
    ((key, pages, _),) = world.handoff.lent.values()
    assert len(key.tokens) == 40 * 4
    assert len(pages) == 20
    assert not world.scheduler.kv.cache.evictable_pages
    world.time += 4.9
    world.step()
    assert world.leases.num_pages == 20
    assert world.engine._engine.services.idle.wait_s <= 0.1
    world.time += 0.1
    world.step()
    assert not world.handoff.lent
    assert world.scheduler.kv.cache.evictable_pages == 20
    assert "40 tokens of its KV are lent in the room 0" in story(world, id)
    assert story(world, id).endswith("its KV is not lent any more: its lease was over")
    world.replay(check=True)


WINDOWS = {"windows": WindowSettings(window=7, num_pages=40)}
STATES = {"states": StateSettings(num_slots=6, least_border=64)}


@pytest.mark.parametrize(("layers", "num_host_pages"), [(WINDOWS, 3), (STATES, 1)])
@pytest.mark.parametrize(("prompt_len", "num_lent"), [(41, 40), (40, 38), (3, 2)])
def test_what_needs_a_resume_state_is_lent_up_to_where_another_server_resumes(
    layers: dict[str, Any], num_host_pages: int, prompt_len: int, num_lent: int
) -> None:
    world = lending(**layers)
    world.send(PROMPT[:prompt_len], max_new_tokens=0)
    world.run_dry()
    ((key, pages, resume_state),) = world.handoff.lent.values()
    assert len(key.tokens) == num_lent * 4
    assert len(pages) == num_lent // 2
    assert len(resume_state) == min(num_host_pages, len(pages))
    world.time += 5.0
    world.step()
    assert not world.handoff.lent
    world.check_idle()
    world.replay(check=True)


@pytest.mark.parametrize("layers", [WINDOWS, STATES])
def test_the_oldest_lease_ends_when_more_than_half_of_the_resume_states_would_be_lent(
    layers: dict[str, Any],
) -> None:
    world = lending(num_pages=1_000, **layers)
    for first in range(12):
        world.send([first, *PROMPT], max_new_tokens=0)
        world.run_dry()
    assert len(world.handoff.lent) == (3 if layers is STATES else 6)
    assert list(world.handoff.lent)[-1] == "11"


@pytest.mark.parametrize("layers", [WINDOWS, STATES])
def test_a_prompt_comes_with_its_resume_state_and_only_its_last_token_is_computed(
    layers: dict[str, Any],
) -> None:
    world = pulling(**layers)
    id = world.send(PROMPT, max_new_tokens=5)
    world.step()
    world.run_dry()
    assert world.finished[id].cached_tokens == 40
    assert world.scheduler.stats().total_prefilled_tokens == 1
    assert world.handoff.num_resume_states == 1
    world.check_outputs()
    world.replay(check=True)


def test_a_request_without_room_for_its_resume_state_waits_and_says_so() -> None:
    world = pulling(states=StateSettings(num_slots=3, least_border=64))
    world._share = 0.0
    for first in (1, 2):
        world.send([first, 8, 9], max_new_tokens=60, ignore_eos=True)
    for _ in range(3):
        world.step()
    world._share = 1.0
    id = world.send(PROMPT, max_new_tokens=5)
    for _ in range(5):
        world.step()
    request = world.scheduler.requests[id]
    why = world.service.feature.why_waits(request)
    assert why == "no memory for the ending of 40 tokens"
    # The first part of a long prompt needs no resume state, and does not go before it all the same.
    world.send(list(range(60, 200)), max_new_tokens=5)
    pulls = world.service.feature.pulls.values()
    for _ in range(5):
        world.step()
        assert [pull.ticket for pull in pulls] == [None, None]
    assert all(pull.num_found for pull in pulls)
    world.run_dry()
    assert world.finished[id].cached_tokens == 40
    world.check_outputs()


def test_the_oldest_lease_ends_when_more_than_half_of_the_pool_would_be_lent() -> None:
    world = lending(num_pages=100)
    for first in range(4):
        world.send([first, *PROMPT], max_new_tokens=0)
        world.run_dry()
    assert list(world.handoff.lent) == ["2", "3"]
    assert world.leases.num_pages == 42


def test_a_prompt_that_takes_more_than_half_of_the_pool_is_lent_alone() -> None:
    world = lending(num_pages=60)
    world.send(PROMPT, max_new_tokens=0)
    world.run_dry()
    world.send([10 + number * 7 % 250 for number in range(81)], max_new_tokens=0)
    world.run_dry()
    assert list(world.handoff.lent) == ["1"]
    assert world.leases.num_pages == 40


def test_leases_give_way_to_running_requests() -> None:
    world = lending(num_pages=60)
    world.send(PROMPT, max_new_tokens=0)
    world.run_dry()
    assert world.handoff.lent
    world._share = 0.0
    id = world.send([7, 8, 9], max_new_tokens=100, ignore_eos=True)
    world.run_dry()
    assert not world.handoff.lent
    assert world.finished[id].reason == "length"
    world.check_outputs()


def test_an_abort_is_no_lease_and_the_other_server_hears_of_it() -> None:
    world = lending()
    id = world.send(PROMPT, max_new_tokens=0)
    world.abort(Abort(ids=(id,)))
    world.step()
    assert not world.handoff.expected
    assert story(world, id).endswith("its KV is not lent: its request ended with abort")


def test_an_abort_that_comes_after_the_end_ends_the_lease() -> None:
    """A client that left while the last step ran reads no answer, and nobody fetches the KV."""
    for steps in range(4):
        world = lending()
        kept = world.send([7, *PROMPT], max_new_tokens=0)
        world.run_dry()
        id = world.send(PROMPT, max_new_tokens=0)
        for _ in range(steps):
            world.step()
        world.tell(Abort(ids=(id,)))
        world.step()
        world.run_dry()
        assert list(world.handoff.lent) == [str(kept)]
        assert not world.service.feature.unwanted
        world.replay(check=True)


def test_a_flush_and_new_weights_end_all_leases() -> None:
    for message in (FlushCache(call=1), UpdateWeightsFromDisk(call=1, model_path="5")):
        world = lending()
        world.send(PROMPT, max_new_tokens=0)
        world.run_dry()
        assert world.handoff.lent
        world.tell(message)
        world.step()
        world.step()
        world.step()
        assert not world.handoff.lent
        assert world.handoff.num_renewed == isinstance(message, UpdateWeightsFromDisk)
        world.send(PROMPT, max_new_tokens=0)
        world.run_dry()
        assert world.handoff.lent
        world.replay(check=True)


def test_a_prompt_comes_and_only_its_last_token_is_computed() -> None:
    world = pulling()
    id = world.send(PROMPT, max_new_tokens=5)
    world.step()
    world.run_dry()
    assert world.finished[id].cached_tokens == 40
    assert world.scheduler.stats().total_prefilled_tokens == 1
    assert "40 tokens came from there:8998" in story(world, id)
    world.check_outputs()
    world.replay(check=True)


def test_several_completions_wait_for_one_prompt() -> None:
    world = pulling()
    world._rooms = 1
    ids = [world.send(PROMPT, max_new_tokens=5) for _ in range(3)]
    assert len(world.service.feature.pulls) == 1
    world.run_dry()
    assert [world.finished[id].cached_tokens for id in ids] == [40, 40, 40]
    assert world.handoff.num_read == 40


def test_what_is_cached_is_not_asked_for() -> None:
    world = pulling()
    for _ in range(2):
        id = world.send(PROMPT, max_new_tokens=5)
        world.run_dry()
    assert world.handoff.num_dismissed == 1
    assert "nothing is taken from there:8998: 40 tokens are cached here" in story(world, id)


def test_a_prompt_longer_than_a_quarter_of_the_pool_comes_in_parts() -> None:
    prompt = [10 + number * 7 % 250 for number in range(161)]
    world = pulling(num_pages=120)
    id = world.send(prompt, max_new_tokens=5)
    world.run_dry()
    assert world.finished[id].cached_tokens == 160
    assert world.handoff.num_read == 160
    world.check_outputs()


def test_a_request_waits_for_memory_that_running_ones_need_and_says_so() -> None:
    world = pulling(num_pages=60)
    first = world.send([1, 2, 3], max_new_tokens=90, ignore_eos=True)
    for _ in range(3):
        world.step()
    second = world.send(PROMPT, max_new_tokens=5, ignore_eos=True)
    for _ in range(5):
        world.step()
    waiting = world.service.feature
    request = world.scheduler.requests[second]
    why = waiting.why_waits(request)
    assert why == "no KV memory for 30 tokens that are ready on there:8998"
    assert explain.Reasons(world.scheduler).of(request) == why
    world.run_dry()
    assert world.finished[first].completion_tokens == 90
    assert world.finished[second].completion_tokens == 5
    world.check_outputs()


def test_a_short_prompt_does_not_take_the_memory_that_a_longer_one_waits_for() -> None:
    world = pulling(num_pages=60)
    world.send([1, 2, 3], max_new_tokens=90, ignore_eos=True)
    for _ in range(3):
        world.step()
    long = world.send(PROMPT, max_new_tokens=5, ignore_eos=True)
    for _ in range(5):
        world.step()
    short = world.send([200, 201, 202, 203, 204], max_new_tokens=5, ignore_eos=True)
    for _ in range(5):
        world.step()
    pulls = world.service.feature.pulls.values()
    assert [pull.num_found > 0 for pull in pulls] == [True, True]
    assert [pull.ticket for pull in pulls] == [None, None]
    for id, words in (
        (long, "for 30 tokens"),
        (short, "were asked for before it get memory first"),
    ):
        reason = explain.Reasons(world.scheduler).of(world.scheduler.requests[id])
        assert reason.startswith("no KV memory for ")
        assert words in reason
    world.run_dry()
    for id in (long, short):
        assert world.finished[id].cached_tokens > 0
    world.check_outputs()


@pytest.mark.parametrize("fallback", ["compute", "fail"])
def test_what_does_not_come_in_time_is_computed_or_fails(fallback: str) -> None:
    world = pulling(wait_s=3.0, fallback=fallback, mood="silent")
    id = world.send(PROMPT, max_new_tokens=5)
    while world.time < 3.5:
        world.step()
    world.run_dry()
    finish = world.finished[id]
    if fallback == "fail":
        assert finish.reason == "error"
        assert finish.status == 503
        assert (
            "did not come from the prefill server (late): nothing arrived within 3 s"
            in finish.message
        )
    else:
        assert finish.completion_tokens == 5
        assert finish.queue_s < 3.0 + 3 * world.tick_s
        world.check_outputs()
    assert world.service.num_missed["late"] == 1
    world.check_idle()
    world.replay(check=True)


def test_pages_are_lost_only_if_they_have_been_given_up_and_do_not_land_for_long() -> None:
    world = pulling(wait_s=3 * HUNG_S)
    cancelled: list[int] = []
    world.handoff.cancel = cancelled.append  # type: ignore[method-assign]
    quarantined = world.scheduler.kv.allocator.quarantined
    world.send(PROMPT, max_new_tokens=5)
    world.handoff.mood = "silent"
    while not world.transfers.num_owned:
        world.step()
    world.time += 2 * HUNG_S
    world.step()
    assert world.transfers.num_owned == 20  # somebody waits for them
    world.time += HUNG_S
    world.step()
    assert len(cancelled) == 1
    lost_at = world.service.wake_at()
    assert world.time < lost_at <= world.time + HUNG_S
    world.time = lost_at - 2 * world.tick_s
    world.step()
    assert world.transfers.num_owned == 20
    assert len(quarantined) == 0
    world.time = lost_at
    world.step()
    assert world.transfers.num_owned == 0
    assert len(quarantined) == 20


def test_a_request_without_memory_in_time_says_so() -> None:
    world = pulling(num_pages=60, wait_s=3.0, fallback="fail")
    world._share = 0.0
    world.send([1, 2, 3], max_new_tokens=90, ignore_eos=True)
    for _ in range(3):
        world.step()
    world._share = 1.0
    ids = [world.send([first, *PROMPT], max_new_tokens=5) for first in (1, 2)]
    while not all(pull.num_found for pull in world.service.feature.pulls.values()):
        world.step()
    world.time += 3.0
    world.step()
    world.run_dry()
    for id in ids:
        assert world.finished[id].status == 503
        assert "nothing arrived within 3 s: no KV memory for " in world.finished[id].message


LENT = "\0lent by there:8998\0"


def test_kv_of_a_lender_with_a_namespace_of_its_own_is_not_found_by_others() -> None:
    world = pulling()
    asked: list[CacheKey] = []
    ask = world.handoff.ask

    def see(pull: int, address: RoomAddress, key: CacheKey, have: int) -> None:
        asked.append(key)
        ask(pull, address, key, have)

    world.handoff.ask = see  # type: ignore[method-assign]
    world.lent_salt = "mine"
    found: list[int] = []
    for salt in (f"{LENT}mine", "mine", "", f"{LENT}mine"):
        world._share = float(salt.startswith(LENT))
        id = world.send(PROMPT, max_new_tokens=5, salt=salt)
        world.run_dry()
        found.append(world.finished[id].cached_tokens)
    assert found == [40, 0, 0, 40]
    assert [key.namespace for key in asked] == ["mine"]
    world.check_outputs()
    world.replay(check=True)


def test_an_abort_in_any_state_leaves_nothing_behind() -> None:
    for num_steps in range(6):
        world = pulling()
        id = world.send(PROMPT, max_new_tokens=5)
        for _ in range(num_steps):
            world.step()
        world.abort(Abort(ids=(id,)))
        world.step()
        world.step()
        assert not world.service.feature.pulls
        assert not world.transfers.table
        world.check_idle()


def test_a_flush_while_pages_come_lets_the_request_compute() -> None:
    world = pulling()
    id = world.send(PROMPT, max_new_tokens=5)
    world.handoff.mood = "silent"
    while not world.transfers.num_owned:
        world.step()
    assert world.scheduler.flush_cache()
    world.check()
    world.run_dry()
    assert world.finished[id].completion_tokens == 5
    world.check_idle()
    world.check_outputs()


@pytest.mark.parametrize("num_steps", range(4))
def test_what_comes_when_the_weights_change_is_not_used_and_what_is_asked_later_comes(
    num_steps: int,
) -> None:
    world = pulling()
    world.send(PROMPT, max_new_tokens=1)
    for _ in range(num_steps):
        world.step()
    world.tell(UpdateWeightsFromDisk(call=1, model_path="5"))
    world.run_dry()
    assert world.handoff.num_renewed == 1
    num_landed = world.service.num_landed
    for prompt in (PROMPT, [7, *PROMPT]):
        id = world.send(prompt, max_new_tokens=5)
        world.run_dry()
        assert world.outputs[id] == expected_output(prompt, 5, VOCAB, {EOS}, 5)
    assert world.service.num_landed >= num_landed + 40
    world.handoff.let_all_end()
    world.replay(check=True)


def test_a_request_that_wants_its_prompt_computed_asks_for_nothing() -> None:
    world = pulling()
    id = world.send(PROMPT, max_new_tokens=5, prompt_logprobs=0)
    world.run_dry()
    assert world.handoff.num_dismissed == 1
    assert "the request needs its prompt computed" in story(world, id)


def test_plain_requests_are_served_by_both() -> None:
    for world in (lending(), pulling()):
        world._share = 0.0
        world.send(PROMPT, max_new_tokens=5)
        world.tell(SetPolicy(call=1, policy="lpm"))
        world.run_dry()
        world.check_outputs()
        assert not world.handoff.num_lent + world.handoff.num_read
    assert isinstance(world.service, PullService)
