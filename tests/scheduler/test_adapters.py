"""Adapters: what a plan says of them, which requests share cached prefixes, which run together, and
that nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.scheduler.random_worlds import (
    drive,
    journal_of_failure,
    random_settings,
    with_drafts,
    with_layers,
    with_states,
)
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import EOS, VOCAB
from tests.seeds import seeds, slow
from weft.engine.explain import explain
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.device import DeviceReply, DeviceRequest, Pending, ReadAdapter
from weft.plan.step import ForwardMode, Plan, Result, Sampling
from weft.scheduler.features.adapters import AdaptersFeature, LoadedAdapter
from weft.scheduler.request import NO_ROW, Request
from weft.scheduler.settings import SchedulerSettings


def plan_of(adapters: list[int] | None, lens: list[int]) -> Plan:
    num = len(lens)
    nothing = np.empty(0, np.int32)
    return Plan(
        step=0,
        mode=ForwardMode.EXTEND,
        rows=np.arange(num, dtype=np.int32),
        starts=np.zeros(num, np.int32),
        lens=np.array(lens, np.int32),
        tokens=np.zeros(sum(lens), np.int32),
        slots=np.arange(sum(lens), dtype=np.int32),
        samples=np.zeros(num, np.bool_),
        sampling=Sampling(
            temperature=np.empty(0, np.float32),
            top_p=np.empty(0, np.float32),
            top_k=nothing,
            min_p=np.empty(0, np.float32),
            seeds=np.empty(0, np.int64),
            positions=nothing,
        ),
        adapters=None if adapters is None else np.array(adapters, np.int32),
    )


def test_each_token_has_the_adapter_of_its_request() -> None:
    adapters = plan_of([1, -1, 0], [2, 1, 3]).adapters_of_tokens(2)
    assert adapters is not None
    assert adapters.tolist() == [1, 1, -1, 0, 0, 0]
    assert plan_of(None, [2, 1]).adapters_of_tokens(0) is None


@pytest.mark.parametrize("adapters", [[0], [-2, 0], [0, 2]])
def test_a_plan_with_adapters_that_cannot_be_is_a_fault(adapters: list[int]) -> None:
    with pytest.raises(AssertionError, match="adapter"):
        plan_of(adapters, [2, 1]).adapters_of_tokens(2)


def namespace(salt: str, adapter: str) -> str:
    message = GenerateRequest(
        id=1, rid="r", sampling=SamplingParams(), cache_salt=salt, adapter=adapter
    )
    request = Request(message, max_len=8, seed=0, arrival_order=0, arrival_s=0.0)
    return request.cache_key(b"").namespace


def test_no_salt_reaches_the_prefixes_of_another_adapter() -> None:
    salts = ["", "a", "\0", "\0a\0", "\0\0a\0", "\0\0", "a\0"]
    pairs = [(salt, adapter) for salt in salts for adapter in ["", "a", "b"]]
    assert len({namespace(*pair) for pair in pairs}) == len(pairs)
    assert namespace("a", "") == "a"


class AdapterWorld(RecordedWorld):
    """A world with adapters, in which each request may have one."""

    def __init__(self, settings: SchedulerSettings, depth: int, rng: random.Random) -> None:
        super().__init__(settings, depth)
        self.rng = rng
        self.replies: list[AdapterReply] = []
        self.most_together = 0  # adapters of one step
        execute = self.runner.execute

        def counted(plan: Plan) -> Result:
            if plan.adapters is not None:
                together = len(set(plan.adapters.tolist()))
                assert together <= self.settings.max_loras_per_batch, "more adapters than slots"
                self.most_together = max(self.most_together, together)
            return execute(plan)

        self.runner.execute = counted  # type: ignore[method-assign]

    @property
    def feature(self) -> AdaptersFeature:
        return self.engine._engine.services.adapters.feature

    def send(self, prompt: list[int], **wishes: Any) -> int:
        wishes.setdefault("adapter", self.rng.choice(["", *self.feature.loaded]))
        return super().send(prompt, **wishes)

    def turn(self) -> list[StepOutput]:
        replies = self.engine.step()
        self.replies += [reply for reply in replies if isinstance(reply, AdapterReply)]
        return [reply for reply in replies if isinstance(reply, StepOutput)]

    def step(self, check: bool = True) -> None:
        super().step(check)
        if check:
            self.check_adapters()

    def check_adapters(self) -> None:
        """The feature's books say what the requests say."""
        feature = self.feature
        requests = self.scheduler.requests.values()
        uses = Counter(one.message.adapter for one in requests if one.message.adapter)
        rows = Counter(
            one.message.adapter for one in requests if one.message.adapter and one.row != NO_ROW
        )
        assert feature.num_rows == rows
        assert {uid: one.num_open for uid, one in feature.loaded.items() if one.num_open} == uses
        slots = [one.adapter_slot for one in feature.loaded.values()]
        assert len(set(slots)) == len(slots) <= feature.num_adapter_slots
        assert feature.num_pinned < max(feature.max_together, 1)

    def ask(self, message: LoadLoraAdapter | UnloadLoraAdapter) -> AdapterReply:
        """The reply, some steps later."""
        self.begin(message)
        for _ in range(400):
            if self.replies:
                return self.replies.pop()
            self.step()
        raise AssertionError("no reply")

    def begin(self, message: LoadLoraAdapter | UnloadLoraAdapter) -> None:
        self.replies.clear()
        reply = self.engine.submit(message)
        if isinstance(reply, AdapterReply):
            self.replies.append(reply)

    def load(self, number: int, **options: Any) -> str:
        """Load an adapter. Returns its uid."""
        uid = uid_of(number)
        reply = self.ask(LoadLoraAdapter(lora_path="x", uid=uid, lora_name=f"a{number}", **options))
        assert reply.success, reply.message
        return uid


def uid_of(number: int) -> str:
    return f"{number + 1:032x}"


def world_of(depth: int = 0, **changes: Any) -> AdapterWorld:
    values: dict[str, Any] = {
        "num_pages": 200,
        "page_size": 4,
        "max_running_requests": 8,
        "context_length": 120,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "aging_s": 0.0,
        "max_loras_per_batch": 2,
        "max_loaded_loras": 4,
        "speculative": "off",
    }
    return AdapterWorld(SchedulerSettings(**{**values, **changes}), depth, random.Random(0))


# Which run together


def run_adapters(seed: int, num_loaded: int, slots: int, **kinds: bool) -> AdapterWorld:
    """A random world in which requests have adapters, which come and go."""
    rng = random.Random(f"adapters {seed}")
    settings = random_settings(rng)
    if kinds.get("drafts"):
        settings = with_drafts(settings, rng)
    if kinds.get("splits"):
        settings = with_layers(settings, rng)
    if kinds.get("states"):
        settings = with_states(settings, rng)
    settings = replace(
        settings, max_loras_per_batch=slots, max_loaded_loras=num_loaded, max_queued_requests=1_000
    )
    world = AdapterWorld(settings, rng.choice([0, 1, 2]), rng)
    with journal_of_failure(world, f"weft-adapters-{seed}-"):
        for number in range(num_loaded):
            world.load(number, pinned=number + 1 < slots and rng.random() < 0.2)
        drive(world, rng, 40)
    return world


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_thirty_adapters_share_four_slots(seed: int) -> None:
    world = run_adapters(seed, 30, 4)
    assert world.most_together <= 4
    world.replay(check=True)


@pytest.mark.parametrize(("seed", "kind"), [(8, "splits"), (9, "states"), (12, "drafts")])
def test_adapters_go_with_whatever_else_a_step_has(seed: int, kind: str) -> None:
    world = run_adapters(seed, 5, 3, **{kind: True})
    assert world.most_together > 1
    world.replay()


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_adapters_come_and_go_while_requests_run(seed: int) -> None:
    world = AdapterWorld(
        replace(random_settings(random.Random(seed)), max_loras_per_batch=2, max_loaded_loras=3),
        seed,
        random.Random(seed),
    )
    rng = world.rng
    counts = Counter[str]()
    for turn in range(150):
        if rng.random() < 0.3:
            number = rng.randrange(8)
            if rng.random() < 0.5:
                pinned = rng.random() < 0.2
                path = "x" if rng.random() < 0.8 else "wrong"
                world.begin(
                    LoadLoraAdapter(
                        call=turn + 1, lora_path=path, uid=uid_of(number), pinned=pinned
                    )
                )
            else:
                world.begin(UnloadLoraAdapter(call=turn + 1, uid=uid_of(number)))
        if rng.random() < 0.5:
            adapter = rng.choice(["", *map(uid_of, range(8))])
            is_there = adapter in world.feature.loaded
            is_there = is_there and not world.feature.loaded[adapter].is_leaving
            id = world.send([rng.randrange(VOCAB), 1, 2], max_new_tokens=9, adapter=adapter)
            if adapter and not is_there and id in world.scheduler.requests:
                raise AssertionError("a request without its adapter was opened")
        world.step()
        for reply in world.replies:
            counts[f"{reply.status}"] += 1
        world.replies.clear()
    world.run_dry()
    world.step()
    world.check_idle()
    world.check_outputs()
    assert counts["200"] > 8
    assert counts["404"]
    slots = {one.adapter_slot for one in world.feature.loaded.values()}
    assert slots == set(world.runner.adapters)
    world.replay()


def test_a_request_with_a_slot_passes_one_that_waits_for_its_own() -> None:
    world = world_of()
    a, b, c = (world.load(number) for number in range(3))
    first = world.send([1, 2], max_new_tokens=20, ignore_eos=True, adapter=a)
    second = world.send([1, 2], max_new_tokens=4, ignore_eos=True, adapter=b)
    waits = world.send([1, 2], max_new_tokens=4, ignore_eos=True, adapter=c)
    passes = world.send([1, 2], max_new_tokens=4, ignore_eos=True, adapter=a)
    base = world.send([1, 2], max_new_tokens=4, ignore_eos=True, adapter="")
    world.step()
    rows = {id for id in world.sent if world.request(id).row != NO_ROW}
    assert rows == {first, second, passes}
    for id in (waits, base):
        found = explain(world.scheduler, id, world.time)
        assert found is not None
        assert found.why == "waits for an adapter slot; adapters in use: 2, the limit"
    world.run_dry()
    world.check_outputs()


def test_the_model_without_an_adapter_counts_as_one_only_while_it_runs() -> None:
    world = world_of()
    a = world.load(0)
    b = world.load(1)
    base = world.send([1], max_new_tokens=4, ignore_eos=True, adapter="")
    world.step()
    ids = [world.send([1], max_new_tokens=8, ignore_eos=True, adapter=uid) for uid in (a, b)]
    world.step()
    assert [world.request(id).row != NO_ROW for id in ids] == [True, False]
    while base not in world.finished:
        world.step()
    world.step()
    assert world.request(ids[1]).row != NO_ROW
    world.run_dry()
    world.check_outputs()


def test_a_pinned_adapter_has_its_slot_for_ever() -> None:
    world = world_of()
    a = world.load(0, pinned=True)
    b = world.load(1)
    c = world.load(2)
    ids = [world.send([1], max_new_tokens=9, ignore_eos=True, adapter=uid) for uid in (b, c)]
    world.step()
    assert [world.request(id).row != NO_ROW for id in ids] == [True, False]
    late = world.send([1], max_new_tokens=2, ignore_eos=True, adapter=a)
    world.step()
    assert late in world.finished or world.request(late).row != NO_ROW
    world.run_dry()
    full = world.ask(LoadLoraAdapter(call=1, lora_path="x", uid=uid_of(3), pinned=True))
    assert (full.success, full.status) == (False, 400)
    assert "at most 1" in full.message


def test_a_step_without_adapters_says_nothing_of_them() -> None:
    world = world_of()
    seen = []
    execute = world.runner.execute
    world.runner.execute = lambda plan: seen.append(plan.adapters) or execute(plan)  # type: ignore
    world.send([1, 2], max_new_tokens=3, adapter="")
    world.run_dry()
    assert seen
    assert set(seen) == {None}
    assert not world.scheduler.hooks.batch_limits


def test_equal_prompts_are_found_again_within_an_adapter_alone() -> None:
    world = world_of()
    a = world.load(0)
    b = world.load(1)
    prompt = list(range(10, 50))
    found = []
    for adapter in (a, a, b, "", "", b):
        id = world.send(prompt, max_new_tokens=2, adapter=adapter)
        world.run_dry()
        found.append(world.finished[id].cached_tokens)
    assert found == [0, 36, 0, 0, 36, 36]
    world.check_outputs()


# Nobody is starved


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "fair", "lof"])
@pytest.mark.parametrize("slots", [1, *slow([2]), 4])
def test_an_overdue_request_has_its_slot_when_one_adapter_has_ended(
    policy: str, slots: int
) -> None:
    """The bound: as long as the longest request takes, and the turns that each overdue request
    has."""
    world = world_of(
        max_loras_per_batch=slots,
        max_loaded_loras=6,
        aging_s=20.0,
        schedule_policy=policy,
        max_running_requests=3 * slots,
    )
    hot = [world.load(number) for number in range(slots)]
    lonely = [world.load(5), ""]
    prefix = list(range(100, 120))
    output_len = 12
    for victim in lonely * 2:
        victim_id = -1
        since = 0
        for turn in range(400):
            while len(world.scheduler.waiting_queue) < 3 * slots:
                number = len(world.sent)
                world.send(
                    [*prefix, number % VOCAB],
                    max_new_tokens=output_len,
                    ignore_eos=True,
                    priority=9,
                    adapter=hot[number % slots],
                )
            if turn == 10:
                victim_id = world.send([5], max_new_tokens=2, ignore_eos=True, adapter=victim)
                since = world.num_steps
            world.step(check=turn % 16 == 0)
            if victim_id in world.finished:
                break
        assert victim_id in world.finished, "it never ran"
        # Overdue, what is older, its own slot, its turn, and its run.
        assert world.num_steps - since < 20 + (3 * slots + 1) * 2 * output_len
    world.check_adapters()


def test_without_aging_hot_adapters_starve_others() -> None:
    world = world_of()
    hot = [world.load(number) for number in range(2)]
    lonely = world.load(3)
    victim = -1
    for turn in range(200):
        while len(world.scheduler.waiting_queue) < 6:
            number = len(world.sent)
            world.send(
                [9, number % VOCAB],
                max_new_tokens=3 + number % 17,
                ignore_eos=True,
                adapter=hot[number % 2],
            )
        world.step(check=False)
        if turn == 20:
            victim = world.send([5], max_new_tokens=2, ignore_eos=True, adapter=lonely)
    assert world.request(victim).admitted_s < 0


def test_an_adapter_that_closes_says_so_and_the_one_with_least_left_does() -> None:
    world = world_of(aging_s=5.0)
    a, b, c = (world.load(number) for number in range(3))
    long = world.send([1], max_new_tokens=60, ignore_eos=True, adapter=a)
    short = world.send([1], max_new_tokens=20, ignore_eos=True, adapter=b)
    world.step()
    waits = world.send([1], max_new_tokens=4, ignore_eos=True, adapter=c)
    for _ in range(8):
        world.step()
    barred = world.send([1], max_new_tokens=4, ignore_eos=True, adapter=b)
    passes = world.send([1], max_new_tokens=40, ignore_eos=True, adapter=a)
    world.step()
    found = explain(world.scheduler, barred, world.time)
    assert found is not None
    assert found.why == "waits for an adapter slot: 'a1' admits no requests for a while"
    assert world.request(passes).row != NO_ROW
    while short not in world.finished:
        world.step()
    world.step()
    assert waits in world.finished or world.request(waits).row != NO_ROW
    assert long not in world.finished
    world.run_dry()
    world.check_outputs()


def test_of_overdue_requests_the_oldest_has_the_next_slot_in_any_order() -> None:
    world = world_of(aging_s=5.0, schedule_policy="priority", max_loaded_loras=5)
    a, b, c, d = (world.load(number) for number in range(4))
    world.send([1], max_new_tokens=60, ignore_eos=True, adapter=a)
    short = world.send([1], max_new_tokens=20, ignore_eos=True, adapter=b)
    world.step()
    oldest = world.send([1], max_new_tokens=9, ignore_eos=True, adapter=c)
    world.step()
    important = world.send([1], max_new_tokens=9, ignore_eos=True, adapter=d, priority=9)
    while short not in world.finished:
        world.step()
    world.step()
    assert world.request(oldest).row != NO_ROW
    assert world.request(important).row == NO_ROW
    world.run_dry()
    world.check_outputs()


def request_of(adapter: str, arrival_order: int) -> Request:
    message = GenerateRequest(id=arrival_order, rid="r", sampling=SamplingParams(), adapter=adapter)
    return Request(message, max_len=8, seed=0, arrival_order=arrival_order, arrival_s=0.0)


def test_an_adapter_closes_for_the_oldest_claim_and_admits_those_that_came_before_it() -> None:
    feature = AdaptersFeature(max_together=1, num_adapter_slots=3, num_rows=1)
    for place, uid in enumerate("abc"):
        feature.add(LoadedAdapter(uid, place, name=uid))
    running = request_of("a", 0)
    running.row = 0
    feature.enter_row(running)
    columns = SimpleNamespace(requests=[running], max_len=np.array([8]), kv_len=np.array([1]))
    walk: Any = SimpleNamespace(
        number=1,
        picked=[],
        now=0.0,
        kv=SimpleNamespace(rows=SimpleNamespace(num_used=1), columns=columns),
        is_overdue=lambda request, now: True,
    )
    assert feature.why_not_batched(request_of("b", 30), walk), "it keeps the next slot"
    assert feature.why_not_batched(request_of("a", 40), walk)
    assert not feature.why_not_batched(request_of("a", 25), walk)
    assert feature.why_not_batched(request_of("c", 20), walk), "an older one has that slot now"
    assert feature.why_not_batched(request_of("a", 25), walk)
    assert not feature.why_not_batched(request_of("a", 10), walk)


def test_a_pinned_adapter_closes_for_nobody() -> None:
    world = world_of(aging_s=5.0)
    pinned = world.load(0, pinned=True)
    other = world.load(1)
    lonely = world.load(2)
    world.send([1], max_new_tokens=30, ignore_eos=True, adapter=pinned)
    world.send([1], max_new_tokens=60, ignore_eos=True, adapter=other)
    world.step()
    world.send([1], max_new_tokens=4, ignore_eos=True, adapter=lonely)
    for _ in range(8):
        world.step()
    passes = world.send([1], max_new_tokens=9, ignore_eos=True, adapter=pinned)
    barred = world.send([1], max_new_tokens=9, ignore_eos=True, adapter=other)
    world.step()
    assert world.request(passes).row != NO_ROW
    assert world.request(barred).row == NO_ROW
    world.run_dry()
    world.check_outputs()


# Loading and unloading


def test_the_adapter_not_used_for_longest_makes_room() -> None:
    world = world_of(max_loaded_loras=2)
    a = world.load(0)
    b = world.load(1)
    world.send([1], max_new_tokens=1, adapter=a)
    world.run_dry()
    reply = world.ask(LoadLoraAdapter(call=1, lora_path="x", uid=uid_of(2)))
    assert (reply.success, reply.evicted) == (True, [b])
    assert set(world.feature.loaded) == {a, uid_of(2)}
    world.send([1], max_new_tokens=30, ignore_eos=True, adapter=a)
    world.send([1], max_new_tokens=30, ignore_eos=True, adapter=uid_of(2))
    world.step()
    reply = world.ask(LoadLoraAdapter(call=2, lora_path="x", uid=b))
    assert (reply.success, reply.status) == (False, 409)
    world.run_dry()
    assert world.scheduler.stats().num_running == 0


def test_a_pinned_adapter_makes_room_for_nobody() -> None:
    world = world_of()
    world.load(0, pinned=True)
    second = world.load(1)
    for number in (2, 3):
        world.load(number)
    reply = world.ask(LoadLoraAdapter(call=1, lora_path="x", uid=uid_of(4)))
    assert reply.success
    assert reply.evicted == [second]


def test_unloading_waits_for_its_requests_and_refuses_new_ones() -> None:
    world = world_of()
    a = world.load(0)
    runs = world.send([1], max_new_tokens=10, ignore_eos=True, adapter=a)
    world.step()
    world.begin(UnloadLoraAdapter(call=7, uid=a))
    assert not world.replies
    refused = world.send([1], max_new_tokens=10, adapter=a)
    world.step()
    assert world.finished[refused].status == 404
    assert world.finished[refused].reason == "error"
    assert "'a0' is being unloaded" in world.finished[refused].message
    again = world.engine.submit(LoadLoraAdapter(call=8, lora_path="x", uid=a))
    assert isinstance(again, AdapterReply)
    assert again.call == 8
    assert again.status == 409
    while runs not in world.finished:
        assert not world.replies
        world.step()
    for _ in range(3):
        world.step()
    (reply,) = world.replies
    assert (reply.call, reply.success, reply.num_requests) == (7, True, 1)
    assert not world.runner.adapters
    assert world.ask(UnloadLoraAdapter(call=9, uid=a)).status == 404
    world.check_outputs()


class HeldRead:
    """Work of a device that ends when it is told to."""

    def __init__(self) -> None:
        self.reply: DeviceReply | None = None

    def done(self) -> bool:
        return self.reply is not None

    def result(self) -> DeviceReply:
        assert self.reply is not None, "asked before it was done"
        return self.reply


def with_held_read(world: AdapterWorld) -> HeldRead:
    """The next adapters are read for as long as they should be."""
    read = HeldRead()
    control = world.runner.control

    def held(request: DeviceRequest) -> Pending:
        return read if isinstance(request, ReadAdapter) else control(request)

    world.runner.control = held  # type: ignore[method-assign]
    return read


def test_steps_go_on_while_an_adapter_is_read() -> None:
    world = world_of(depth=1)
    first = world.load(0)
    idle = world.load(2)
    read = with_held_read(world)
    runs = world.send([1, 2, 3], max_new_tokens=30, ignore_eos=True, adapter=first)
    world.begin(LoadLoraAdapter(lora_path="x", uid=uid_of(1), lora_name="second"))
    for _ in range(20):
        world.step()
    assert len(world.outputs[runs]) >= 15
    assert not world.replies
    # Other work of the device ends before: the journal tells one from the other.
    assert world.engine.submit(UnloadLoraAdapter(call=5, uid=idle)) is None
    for _ in range(5):
        world.step()
    assert [reply.call for reply in world.replies] == [5]
    world.replies.clear()
    read.reply = DeviceReply(ok=True)
    for _ in range(3):
        world.step()
    assert [reply.success for reply in world.replies] == [True]
    world.send([4], max_new_tokens=3, adapter=uid_of(1))
    world.run_dry()
    world.replay(check=True)


def test_a_read_that_fails_puts_nothing_in() -> None:
    world = world_of()
    first = world.load(0)
    before = dict(world.runner.adapters)
    read = with_held_read(world)
    runs = world.send([1], max_new_tokens=10, ignore_eos=True, adapter=first)
    world.begin(LoadLoraAdapter(lora_path="x", uid=uid_of(1)))
    world.step()
    read.reply = DeviceReply(ok=False, message="no such values")
    world.run_dry()
    [reply] = world.replies
    assert (reply.success, reply.message) == (False, "no such values")
    assert len(world.outputs[runs]) == 10
    assert world.runner.adapters == before
    assert not world.engine._engine.services.adapters.is_reading
    world.replay(check=True)


def test_what_cannot_be_read_or_loaded_evicts_nothing() -> None:
    world = world_of(max_loaded_loras=2)
    first = world.load(0)
    second = world.load(1)
    before = dict(world.runner.adapters)
    reply = world.ask(LoadLoraAdapter(lora_path="wrong", uid=uid_of(2)))
    assert (reply.success, reply.evicted) == (False, [])
    read = with_held_read(world)
    world.begin(LoadLoraAdapter(lora_path="x", uid=uid_of(2)))
    world.step()
    read.reply = DeviceReply(ok=False, message="no such values")
    world.run_dry()
    [reply] = world.replies
    assert (reply.success, reply.evicted) == (False, [])
    assert world.runner.adapters == before
    assert list(world.feature.loaded) == [first, second]
    world.send([1], max_new_tokens=3, adapter=first)
    world.send([1], max_new_tokens=3, adapter=second)
    world.run_dry()
    world.check_outputs()
    world.replay(check=True)


def test_an_adapter_that_came_into_use_while_another_was_read_stays() -> None:
    world = world_of(max_loaded_loras=1)
    first = world.load(0)
    read = with_held_read(world)
    world.begin(LoadLoraAdapter(call=3, lora_path="x", uid=uid_of(1)))
    runs = world.send([1], max_new_tokens=20, ignore_eos=True, adapter=first)
    world.step()
    read.reply = DeviceReply(ok=True)
    world.run_dry()
    [reply] = world.replies
    assert (reply.call, reply.success, reply.status) == (3, False, 409)
    assert "--max-loaded-loras" in reply.message
    assert list(world.feature.loaded) == [first]
    assert len(world.outputs[runs]) == 20
    # The refused one leaves nothing behind: it can be loaded now.
    read.reply = DeviceReply(ok=True)
    assert world.ask(LoadLoraAdapter(lora_path="x", uid=uid_of(1))).evicted == [first]


def test_what_cannot_be_loaded_leaves_its_place_free() -> None:
    world = world_of(max_loaded_loras=1)
    reply = world.ask(LoadLoraAdapter(call=1, lora_path="wrong", uid=uid_of(0)))
    assert not reply.success
    assert not world.feature.loaded
    world.load(1)
    assert world.load(1) == uid_of(1)


def test_an_engine_without_adapters_refuses_them() -> None:
    world = world_of(max_loaded_loras=0)
    id = world.send([1], max_new_tokens=1, adapter=uid_of(0))
    world.step()
    assert world.finished[id].status == 400
    assert "--enable-lora" in world.finished[id].message
    reply = world.ask(LoadLoraAdapter(call=1, lora_path="x", uid=uid_of(0)))
    assert reply.status == 400
