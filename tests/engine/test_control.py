"""Control requests to an engine: what they change, what they refuse, and that a journal holds
them."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB
from weft.engine.control.handlers import HANDLERS, answer
from weft.engine.control.settings import CHANGEABLE
from weft.journal.replay import Replay
from weft.messages.codec import FromEngine
from weft.messages.control import (
    ConfigureLogging,
    ConfigureLoggingReply,
    FlushCache,
    FlushCacheReply,
    FreezeGC,
    FreezeGCReply,
    GetInternalState,
    GetInternalStateReply,
    SetInternalState,
    SetInternalStateReply,
    Setting,
    SlowDown,
    SlowDownReply,
    StartProfile,
    StartProfileReply,
    StopProfile,
    StopProfileReply,
)
from weft.scheduler.settings import SchedulerSettings


class Desk(RecordedWorld):
    """A world to which control requests are put."""

    def ask(self, message: Any) -> Any:
        return self.engine.submit(message)

    def change(self, **changes: Setting) -> SetInternalStateReply:
        reply = self.ask(SetInternalState(call=1, server_args=changes))
        assert isinstance(reply, SetInternalStateReply)
        return reply

    def state(self) -> GetInternalStateReply:
        reply = self.ask(GetInternalState(call=1))
        assert isinstance(reply, GetInternalStateReply)
        return reply

    def replays(self) -> bool:
        return Replay(self.records).run()

    @property
    def num_with_row(self) -> int:
        return len(self.scheduler.requests) - len(self.scheduler.waiting_queue)

    def replies(self) -> list[FromEngine]:
        """Of one more step; tokens are taken in."""
        self.time += 1.0
        return self.engine.step()


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    logger = logging.getLogger("weft")
    before = logger.level
    yield
    logger.setLevel(before)


# Settings while running


def test_what_can_be_changed_is_reported_with_its_values() -> None:
    desk = Desk(settings(chunked_prefill_size=-1, schedule_policy="lpm"))
    told = desk.state().server_args
    assert set(told) == set(CHANGEABLE)
    assert told["schedule_policy"] == "lpm"
    assert told["max_running_requests"] == 4
    assert told["chunked_prefill_size"] == -1
    desk.change(max_queued_requests=7)
    assert desk.state().server_args == told | {"max_queued_requests": 7}


def test_of_several_settings_all_are_changed_or_none() -> None:
    desk = Desk(settings())
    before = desk.state()
    refused = desk.change(schedule_policy="lpm", max_queued_requests=3, max_running_requests=5)
    assert not refused.success
    assert refused.name == "max_running_requests"
    assert "at most 4 as at the start" in refused.message
    assert desk.state() == before
    done = desk.change(schedule_policy="lpm", max_queued_requests=3, max_running_requests=2)
    assert done.success
    assert done.before == {
        "schedule_policy": "fcfs",
        "max_queued_requests": 4_096,
        "max_running_requests": 4,
    }
    assert desk.state().server_args["schedule_policy"] == "lpm"
    assert desk.state().stats.max_running_requests == 2


def test_what_cannot_be_changed_is_refused_with_what_can() -> None:
    refused = Desk(settings()).change(page_size=32)
    assert refused.name == "page_size"
    assert "'page_size' cannot be changed while running; schedule_policy, " in refused.message
    assert all(name in refused.message for name in CHANGEABLE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule_policy", "magic"),
        ("schedule_policy", 3),
        ("schedule_conservativeness", -0.1),
        ("schedule_conservativeness", True),
        ("schedule_conservativeness", float("nan")),
        ("max_running_requests", 0),
        ("max_running_requests", 2.0),
        ("max_running_requests", True),
        ("max_queued_requests", -1),
        ("max_prefill_tokens", 16_385),
        ("chunked_prefill_size", 7),  # less than a page
        ("chunked_prefill_size", None),
        ("mixed_chunk", 1),
        ("log_level", "loud"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Setting) -> None:
    desk = Desk(settings(page_size=8))
    before = desk.state()
    refused = desk.change(**{name: value})
    assert (refused.success, refused.name) == (False, name)
    assert refused.message.startswith(f"{name} is {str(value)!r}; ")
    assert desk.state() == before


def test_requests_beyond_a_lower_limit_end_and_no_new_ones_come_in_before_there_is_room() -> None:
    desk = Desk(settings())
    for i in range(4):
        desk.send([i], max_new_tokens=5 + i, ignore_eos=True)
    desk.step()
    assert desk.num_with_row == 4
    desk.change(max_running_requests=2)
    late = [desk.send([9, i], max_new_tokens=3, ignore_eos=True) for i in range(3)]
    seen = []
    while len(desk.finished) < 7:
        desk.step()
        seen.append(desk.num_with_row)
    assert seen[:4] == [4, 4, 4, 3]  # nobody comes in while more run than may
    assert max(seen[4:]) == 2
    assert all(desk.finished[id].retractions == 0 for id in range(7))
    assert set(late) < set(desk.finished)
    desk.check_outputs()
    assert desk.replays()


def test_a_limit_is_raised_again_up_to_what_it_was_at_the_start_also_in_a_new_journal() -> None:
    desk = Desk(settings(), max_bytes=1)  # begins anew whenever it is idle
    desk.change(max_running_requests=1, chunked_prefill_size=16)
    desk.send([1], max_new_tokens=1)
    desk.run_dry()
    assert desk.scheduler.kv.rows.num_free == 1
    assert not desk.change(max_running_requests=5).success
    assert desk.change(max_running_requests=4, chunked_prefill_size=64).success
    for i in range(4):
        desk.send([i], max_new_tokens=2, ignore_eos=True)
    desk.step()
    assert desk.num_with_row == 4
    desk.run_dry()
    assert desk.replays()


def test_the_conservativeness_sets_the_bounds_of_the_reserve() -> None:
    desk = Desk(settings())
    before = desk.state().state["init_new_token_ratio"]
    desk.change(schedule_conservativeness=0.5)
    after = desk.state()
    assert (
        after.state["init_new_token_ratio"]
        == after.stats.new_token_ratio
        == pytest.approx(0.5 * before)
    )
    assert 0 < after.state["min_new_token_ratio"] < after.state["init_new_token_ratio"]


def test_chunks_get_shorter_while_a_prompt_is_open() -> None:
    desk = Desk(settings(chunked_prefill_size=64))
    id = desk.send([i % VOCAB for i in range(150)], max_new_tokens=2, ignore_eos=True)
    desk.step()
    assert desk.scheduler.prefills.chunked_req is not None
    desk.change(chunked_prefill_size=10)
    desk.step()
    assert desk.request(id).kv_len == 64 + 10
    desk.run_dry()
    desk.check_outputs()


@pytest.mark.parametrize("seed", range(3))
def test_changing_settings_all_the_time_breaks_nothing_and_is_replayed(seed: int) -> None:
    rng = random.Random(seed)
    base = SchedulerSettings(
        num_pages=60, page_size=2, max_running_requests=6, context_length=60, vocab_size=VOCAB, eos_token_ids=(3,),
        chunked_prefill_size=24,
    mixed_chunk=False, aging_s=0.0, )  # fmt: skip
    desk = Desk(base, depth=seed % 2)
    choices: dict[str, list[Setting]] = {
        "schedule_policy": ["fcfs", "lpm", "priority", "hrrn", "static"],
        "schedule_conservativeness": [0.0, 0.3, 1.0, 4.0],
        "max_running_requests": [1, 2, 6],
        "max_queued_requests": [5, 100],
        "max_prefill_tokens": [2, 30, 16_384],
        "chunked_prefill_size": [2, 8, 24],
        "mixed_chunk": [True, False],
    }
    for _ in range(300):
        if rng.random() < 0.4:
            prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
            desk.send(prompt, max_new_tokens=rng.randrange(1, 15), priority=rng.choice([0, 0, 50]))
        if rng.random() < 0.3:
            names = rng.sample(sorted(choices), rng.randrange(1, 4))
            assert desk.change(**{name: rng.choice(choices[name]) for name in names}).success
        desk.step()
        assert desk.num_with_row <= base.max_running_requests
    desk.change(max_running_requests=6)
    desk.run_dry()
    desk.check_idle()
    desk.check_outputs()
    assert desk.replays()


# Pace, log, collector, cache


def test_a_step_is_told_to_take_longer_and_no_longer() -> None:
    desk = Desk(settings())
    assert desk.ask(SlowDown(call=1, forward_sleep_time=0.5)) == SlowDownReply(
        call=1, before_s=None
    )
    assert desk.engine.min_step_s == 0.5
    assert desk.state().state["forward_sleep_time"] == 0.5
    assert desk.ask(SlowDown(call=2, forward_sleep_time=None)) == SlowDownReply(
        call=2, before_s=0.5
    )
    assert desk.engine.min_step_s == 0.0
    assert desk.state().state["forward_sleep_time"] is None


def test_the_level_of_the_log_is_changed_and_a_wrong_one_refused() -> None:
    desk = Desk(settings())
    desk.ask(ConfigureLogging(call=1, log_level="error"))
    assert not logging.getLogger("weft.scheduler").isEnabledFor(logging.WARNING)
    refused = desk.ask(ConfigureLogging(call=2, log_level="loud"))
    assert isinstance(refused, ConfigureLoggingReply)
    assert (refused.success, refused.before) == (False, "error")
    assert "debug, info, warning, error" in refused.message
    assert desk.change(log_level="debug").before == {"log_level": "error"}
    assert logging.getLogger("weft.scheduler").isEnabledFor(logging.DEBUG)


def test_frozen_objects_are_out_of_the_collectors_sight(own_freezing: None) -> None:
    reply = Desk(settings()).ask(FreezeGC(call=1))
    assert isinstance(reply, FreezeGCReply)
    # What other threads let go of is gone.
    assert reply.frozen_objects >= gc.get_freeze_count() > 1_000
    assert len(gc.get_objects()) < reply.frozen_objects


def test_a_flush_waits_for_an_idle_engine_as_long_as_it_may_and_then_says_why_not() -> None:
    desk = Desk(settings(max_running_requests=1))
    desk.send([1, 2, 3], max_new_tokens=5, ignore_eos=True)
    desk.send([4], max_new_tokens=5, ignore_eos=True)
    desk.step()
    desk.tell(FlushCache(call=1, timeout_s=3.0))
    desk.tell(FlushCache(call=2, timeout_s=1_000.0))
    answers: list[FlushCacheReply] = []
    while len(answers) < 2:
        answers += [reply for reply in desk.replies() if isinstance(reply, FlushCacheReply)]
    refused, done = answers
    assert (refused.call, refused.success, done.call, done.success) == (1, False, 2, True)
    assert "1 requests are running and 1 wait" in refused.message
    assert desk.num_with_row == 0
    assert desk.scheduler.kv.cache.evictable_pages == 0


# The profiler


class FakeReport:
    state = "done"
    num_steps = 3
    trace = "a/t.json.gz"
    table = "aten::mm"
    message = ""


class FakeProfiler:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def start(self, **how: Any) -> str:
        if how["folder"] == "/etc":
            raise ValueError("the folder is '/etc', which is not below --profile-dir")
        self.asked.append(how)
        return FakeReport.trace

    def stop(self) -> FakeReport:
        return FakeReport()


def test_the_profiler_that_is_handed_in_is_started_and_stopped() -> None:
    profiler = FakeProfiler()

    class Engine:
        observers = SimpleNamespace(profiler=profiler)

    def ask(message: Any) -> Any:
        return answer(Engine, HANDLERS[type(message)], message)  # type: ignore[arg-type]

    begun = ask(StartProfile(call=1, num_steps=3, with_stack=True))
    assert begun == StartProfileReply(call=1, success=True, trace="a/t.json.gz")
    assert (profiler.asked[0]["num_steps"], profiler.asked[0]["with_stack"]) == (
        3,
        True,
    )
    assert ask(StartProfile(call=2, output_dir="/etc")) == StartProfileReply(
        call=2, success=False, message="the folder is '/etc', which is not below --profile-dir"
    )
    profiler.start = lambda **how: None  # type: ignore[method-assign]
    assert ask(StartProfile(call=4)) == StartProfileReply(call=4, success=True, is_preparing=True)
    assert ask(StopProfile(call=3)) == StopProfileReply(
        call=3, state="done", num_steps=3, trace="a/t.json.gz", table="aten::mm"
    )


def test_an_engine_without_a_profiler_says_so() -> None:
    desk = Desk(settings())
    assert not desk.ask(StartProfile(call=1)).success
    stopped = desk.ask(StopProfile(call=2))
    assert stopped.state == "none"
    assert stopped.message == "this engine has no profiler"
