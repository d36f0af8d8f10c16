"""Where requests are, what happened to them, and why, in scenes that can be counted by hand."""

from __future__ import annotations

import logging
import random
import re

import pytest

from tests.faults import Injected
from tests.scheduler.scenes import Patience, settings
from tests.scheduler.world import World
from weft.engine import explain as insight
from weft.memory.allocator import OutOfPages
from weft.messages.control import Explanation
from weft.messages.sampling import Grammar
from weft.scheduler import policies
from weft.scheduler.history import (
    MAX_EVENTS,
    MAX_FINISHED,
    MAX_PASSES,
    RequestHistory,
    Stop,
)
from weft.scheduler.limits import Deadlines
from weft.scheduler.request import Request

KEPT = " (of 40 free and 0 evictable; others are promised to running requests)"


def explain(world: World, id: int) -> Explanation:
    explained = insight.explain(world.scheduler, id, world.time)
    assert explained is not None
    return explained


def told(world: World, id: int) -> list[str]:
    return [entry.what for entry in explain(world, id).timeline]


def test_the_story_of_a_request_has_its_stages() -> None:
    world = World(settings(chunked_prefill_size=16))
    world.time = 100.0
    id = world.send(list(range(20)), max_new_tokens=4, ignore_eos=True)
    world.run_dry()
    one = explain(world, id)
    assert one.state == "finished"
    assert [entry.what for entry in one.timeline] == [
        "arrived: 20 prompt tokens",
        "admitted: 0 tokens cached, computes 0 to 16 of 20",
        "chunk: computes 16 to 20 of 20",
        "first token",
        "finished: length, 4 tokens",
    ]
    assert one.stages.queued_s == 1.0
    assert one.stages.prefill_s == 1.0
    assert one.stages.decode_s == 3.0
    assert one.stages.total_s == 5.0
    assert one.prompt_tokens == 20
    assert one.output_tokens == 4


def test_a_request_that_waits_for_memory_is_told_how_much_and_for_whom() -> None:
    world = World(settings(num_pages=100, schedule_conservativeness=1.0))
    world.send(list(range(60)), max_new_tokens=30, ignore_eos=True)
    world.step()
    ids = [world.send(list(range(80 * i, 80 * i + 20)), max_new_tokens=20) for i in range(1, 4)]
    for _ in range(5):
        world.step()
    (waits,) = [what for what in told(world, ids[0]) if what.startswith("waits")]
    assert waits == "waits: no KV memory for a prefill: it needs 42 tokens, 11 are available" + KEPT
    (waits,) = [what for what in told(world, ids[2]) if what.startswith("waits")]
    assert (
        waits
        == f"waits: no KV memory for a prefill: r1 needs 42 tokens, 11 are available{KEPT}; earlier requests that waited, too: 2"
    )
    entry = explain(world, ids[2]).timeline[-1]
    assert entry.first_step == 1
    assert entry.last_step == 5
    assert entry.times == 5
    assert explain(world, ids[2]).position == 2
    assert str(entry).endswith("s  step 1-5, 5 times: " + waits)


def test_a_request_that_waits_for_a_row_is_told_the_limit() -> None:
    world = World(settings(max_running_requests=1))
    world.send([1], max_new_tokens=9, ignore_eos=True)
    waiting = world.send([2], max_new_tokens=2)
    for _ in range(4):
        world.step()
    assert (
        told(world, waiting)[-1]
        == "waits: as many requests run as --max-running-requests allows (1)"
    )
    world.run_dry()
    assert "waits" not in told(world, waiting)[-1]
    assert explain(world, waiting).stages.queued_s > 5


def test_a_request_behind_a_long_prompt_is_told_of_the_budget() -> None:
    world = World(settings(chunked_prefill_size=16))
    world.send(list(range(50)), max_new_tokens=2)
    behind = world.send(list(range(100, 140)), max_new_tokens=2)
    world.step()
    world.step()
    assert told(world, behind)[-1] == "waits: the tokens of the step were used up before it"
    for _ in range(2):
        world.step()
    assert told(world, behind)[-1].startswith("admitted")


def test_a_retraction_tells_what_had_to_be_computed_again() -> None:
    world = World(settings(num_pages=90, schedule_conservativeness=0.0))
    ids = [world.send(list(range(20 * i, 20 * i + 10)), max_new_tokens=40) for i in range(3)]
    world.run_dry()
    traces = [explain(world, id) for id in ids]
    retracted = [one for one in traces if one.retractions]
    assert retracted
    for one in retracted:
        words = [entry.what for entry in one.timeline]
        again = [what for what in words if what.startswith("admitted: again: of its")]
        assert len(again) == one.retractions
        assert one.recomputed_tokens > 0
        assert any(what.startswith("retracted: no KV memory for the next step") for what in words)
    assert sum(one.retractions for one in traces) == world.scheduler.stats().total_retractions


def test_a_request_that_a_part_holds_is_told_so_and_steps_are_counted() -> None:
    world = World(settings(), features=(Patience(),))
    world.send([0], max_new_tokens=8, ignore_eos=True)
    held = world.send([1], max_new_tokens=3)
    for _ in range(6):
        world.step()
    entry = explain(world, held).timeline[-1]
    assert entry.what == "held: not ready yet"
    assert entry.times == 6


def test_requests_of_the_same_name_are_all_told_the_newest_first() -> None:
    world = World(settings())
    world.send([1], max_new_tokens=1)
    world.run_dry()
    world.sent.clear()
    world.finished.clear()
    world.send([1], max_new_tokens=9, ignore_eos=True)
    world.step()
    found = insight.trace_request_flow(world.scheduler, "r0", world.time)
    assert [one.state for one in found] == ["prefilling", "finished"]
    assert insight.trace_request_flow(world.scheduler, "r", world.time) == []


def test_the_queue_and_its_rows_are_listed_in_order() -> None:
    world = World(settings(max_running_requests=2))
    for i in range(5):
        world.send([i, 1], max_new_tokens=9, ignore_eos=True)
    for _ in range(3):
        world.step()
    rows = insight.list_requests(world.scheduler, world.time, limit=4)
    assert [(row.rid, row.state, row.position) for row in rows] == [
        ("r0", "decoding", None),
        ("r1", "decoding", None),
        ("r2", "waiting", 0),
        ("r3", "waiting", 1),
    ]
    assert rows[0].output_tokens == 3
    assert rows[0].age_s == 3.0
    assert rows[2].output_tokens == 0
    status = insight.get_queue_status(world.scheduler)
    assert status.waiting_queue_size == 3
    assert status.running_batch_size == 2
    assert status.prefilling == 0
    assert status.batch_is_full
    assert status.max_queued_requests == 4_096


@pytest.mark.parametrize("policy", policies.names())
def test_looking_on_changes_no_decision(policy: str) -> None:
    plain, watched = (
        World(settings(schedule_policy=policy, num_pages=90, aging_s=6.0)) for _ in range(2)
    )
    for world in (plain, watched):
        for i in range(12):
            world.send(
                [*range(i % 3 * 40, i % 3 * 40 + 20), i],
                max_new_tokens=20,
                user="ab"[i % 2],
                priority=i % 4,
            )
        while world.has_work:
            world.step()
            if world is watched:
                insight.list_requests(world.scheduler, world.time, 100)
                insight.trace_request_flow(world.scheduler, "r5", world.time)
    assert plain.outputs == watched.outputs
    assert plain.time == watched.time


def test_the_memory_of_the_diary_is_bounded() -> None:
    world = World(settings(context_length=400, chunked_prefill_size=1, max_running_requests=1))
    id = world.send(list(range(1, 200)), max_new_tokens=1)
    world.run_dry(check=False)
    trace = world.scheduler.history.trace(id)
    assert trace is not None
    assert len(trace.events) < 8
    for _ in range(MAX_FINISHED + 50):
        world.send([1], max_new_tokens=1)
        world.step(check=False)
    world.run_dry(check=False)
    assert sum(1 for _ in world.scheduler.history.traces()) == MAX_FINISHED
    for i in range(3 * MAX_EVENTS):
        trace.waits_again(float(i), i)
    assert len(trace.waits) == MAX_EVENTS
    assert world.scheduler.history._passes.maxlen == MAX_PASSES
    assert insight.explain(world.scheduler, id, 0.0) is None


def test_stage_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(settings())
    id = world.send([1], max_new_tokens=3, ignore_eos=True)
    world.run_dry()
    with caplog.at_level(logging.INFO, "weft"):
        insight.log_request_processing_time(world.scheduler, id, world.time)
    (record,) = caplog.records
    assert record.getMessage() == "processing_time"
    assert record.fields == {
        "rid": "r0",
        "queued_s": 1.0,
        "prefill_s": 0.0,
        "decode_s": 2.0,
        "total_s": 3.0,
    }  # type: ignore[attr-defined]


def test_a_request_that_is_refused_has_a_story_of_two_entries() -> None:
    world = World(settings())
    world.time = 3.0
    id = world.send([1] * 500, max_new_tokens=1)
    one = explain(world, id)
    refused = (
        "finished: refused: the prompt has 500 tokens and 1 are to be generated; together at most "
        "200 fit"
    )
    assert [entry.what for entry in one.timeline] == ["arrived: 500 prompt tokens", refused]
    assert one.state == "finished"
    assert one.output_tokens == 0
    assert one.stages.total_s == 0.0


def test_a_request_that_memory_can_never_hold_is_told_what_is_left_of_it() -> None:
    world = World(settings(num_pages=10, context_length=500))
    id = world.send([1] * 300, max_new_tokens=1)
    [_, refused] = explain(world, id).timeline
    max_len = world.scheduler.limits.max_len
    free = world.scheduler.kv.room.available
    assert refused.what.endswith(
        f"at most {max_len} fit, of which now {free} are free and 0 can be evicted"
    )


def test_a_request_that_could_not_be_opened_has_ended_with_its_error_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Deadlines, request: Request) -> None:
        raise Injected("planted")

    world = World(settings())
    monkeypatch.setattr(Deadlines, "arrived", fails)
    with pytest.raises(Injected):
        world.send([1, 2], max_new_tokens=3)
    world.scheduler.fail(0, "it could not be opened")
    one = explain(world, 0)
    assert one.state == "finished"
    assert one.output_tokens == 0
    assert one.timeline[-1].what == "finished: error: it could not be opened"


def test_what_is_computed_anew_after_a_failure_is_reported_in_the_step_and_at_the_time_of_it() -> (
    None
):
    world = World(settings(), fail_steps={4})
    world.time = 100.0
    id = world.send([1, 2], max_new_tokens=9, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.send([4, 5], max_new_tokens=9, ignore_eos=True)  # its step fails
    world.step()
    entry = explain(world, id).timeline[-1]
    assert entry.what == "retracted: a step failed on the device: all is computed anew"
    assert entry.at_s == 5.0
    assert entry.first_step == 5


class PlainHistory:
    """The walks that left a request waiting, by its number: what a history is told, written down
    one by one."""

    def __init__(self) -> None:
        self.waiting: dict[int, bool] = {}  # whether a walk looks at it, by number
        self.seen: dict[int, list[int]] = {}

    def walk(self, number: int, admitted: list[int]) -> None:
        for id, is_looked_at in self.waiting.items():
            if is_looked_at and id not in admitted:
                self.seen[id].append(number)


@pytest.mark.parametrize("seed", range(8))
def test_the_reasons_of_a_request_are_those_of_the_walks_that_left_it_waiting(seed: int) -> None:
    """Each walk is told with a number of its own, so that no two count as one."""
    rng = random.Random(f"history {seed}")
    history = RequestHistory()
    plain = PlainHistory()
    running: set[int] = set()
    now = 0.0
    step = 1_000
    num_waits = dict[int, list[int]]()
    for number in range(300):
        now += 1.0
        step += rng.randrange(3)
        looked_at = [id for id, is_looked_at in plain.waiting.items() if is_looked_at]
        aside = [id for id, is_looked_at in plain.waiting.items() if not is_looked_at]
        what = rng.choice(["arrive", "walk", "walk", "retract", "hold", "release", "finish"])
        if what == "arrive":
            history.arrived(number, f"r{number}", number, 5, 0, now, step)
            plain.waiting[number], plain.seen[number] = True, []
            num_waits[number] = [step]
        elif what == "walk":
            history.begin_walk()
            admitted = rng.sample(looked_at, min(len(looked_at), rng.randrange(2)))
            history.record_pass(now, step, Stop.NO_TOKEN, 10_000 + number)
            for id in admitted:
                history.admitted(id, 0, 5, 5, now, step)
            plain.walk(10_000 + number, admitted)
            for id in admitted:
                del plain.waiting[id]
            running.update(admitted)
        elif what == "retract" and running:
            id = running.pop()
            history.retracted(id, "", now, step)
            plain.waiting[id] = True
            num_waits[id].append(step)
        elif what == "hold" and looked_at:
            id = rng.choice(looked_at)
            history.waits_for(id, "", now, step)
            plain.waiting[id] = False
        elif what == "release" and aside:
            id = rng.choice(aside)
            history.waits_no_more(id, "", now, step)
            plain.waiting[id] = True
            num_waits[id].append(step)
        elif what == "finish" and rng.random() < 0.2 and plain.waiting:
            id = rng.choice(list(plain.waiting))
            history.finished(id, "", 0, now, step)
            del plain.waiting[id]
    for id, seen in plain.seen.items():
        trace = history.trace(id)
        assert trace is not None
        assert [one.id for wait in trace.waits for one in history.passes(wait)] == seen
        assert [wait.since_step for wait in trace.waits] == num_waits[id]
    assert max(map(len, num_waits.values())) > 2


def test_a_retraction_says_which_step_lacked_how_much_and_what_was_there() -> None:
    world = World(settings(num_pages=90, schedule_conservativeness=0.0))
    ids = [world.send(list(range(20 * i, 20 * i + 10)), max_new_tokens=40) for i in range(3)]
    world.run_dry()
    words = [what for id in ids for what in told(world, id) if what.startswith("retracted")]
    assert words
    for what in words:
        assert re.match(
            r"retracted: no KV memory for the next step: decode out of memory: \d tokens to allocate, "
            r"\d are free and \d+ can be evicted; fewer running requests need less "
            r"\(--max-running-requests\); \d+ tokens to be found again",
            what,
        )
    assert world.scheduler.outbox.out_of_memory.startswith("decode out of memory: ")


def test_an_allocation_that_fails_says_which_step_needs_how_much() -> None:
    world = World(settings(num_pages=90))
    kv = world.scheduler.kv
    kv.alloc(80, 1)
    with pytest.raises(OutOfPages) as failed:
        kv.alloc(20, 2)
    assert str(failed.value).startswith(
        "prefill out of memory: 20 tokens to allocate, 10 are free and 0 can be evicted; "
    )
    with pytest.raises(OutOfPages, match=r"^decode out of memory: 11 tokens"):
        kv.alloc(11, 2, "decode")


def test_an_explanation_names_row_and_grammar_and_gives_the_reason_of_the_list() -> None:
    world = World(settings(max_running_requests=1))
    grammar = Grammar("regex", "a*")
    runs = world.send([1, 2], max_new_tokens=9, ignore_eos=True, grammar=grammar)
    waits = world.send([3, 4], max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    listed = {row.id: row for row in insight.list_requests(world.scheduler, world.time, limit=9)}
    one = explain(world, runs)
    other = explain(world, waits)
    assert one.row == world.request(runs).row
    assert one.grammar == grammar.name
    assert grammar.name.startswith("regex ")
    assert other.row is None
    assert other.grammar == ""
    assert [one.why, other.why] == [listed[runs].why, listed[waits].why]
    assert other.why
