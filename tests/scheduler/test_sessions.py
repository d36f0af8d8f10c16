"""Sessions: what a request continues, what is refused, how long KV is kept, and what gives way to
whom."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from tests.scheduler.session_scene import Scene, prompt
from tests.scheduler.world import VOCAB
from weft.engine import explain as insight
from weft.messages.control import FlushCache, ListRequests, ListRequestsReply
from weft.messages.requests import Abort
from weft.messages.sessions import (
    SessionParams,
)
from weft.scheduler.features.turns import Session, SessionTurn


def test_a_request_goes_on_where_the_last_one_ended_and_finds_its_kv() -> None:
    world = Scene()
    assert world.open() == ""
    first = world.say(prompt(10))
    world.run_dry()
    history = prompt(10) + world.outputs[first]
    second = world.say(prompt(3, 50))
    world.prompts[second] = history + prompt(3, 50)
    world.run_dry()
    world.check_outputs()
    assert world.finished[second].prompt_tokens == 19
    assert world.finished[second].cached_tokens == 12  # of 15 with KV: whole pages
    assert world.turn_of(second) == world.prompts[second] + world.outputs[second]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "all"),
        ({"rid": "first"}, "first"),
        ({"rid": "first", "offset": 7}, "first 7"),
        ({"rid": "first", "offset": -2}, "first -2"),
        ({"rid": "first", "drop_previous_output": True}, "first 10"),
        ({"rid": "first", "drop_previous_output": True, "offset": -1}, "first 9"),
        ({"offset": 5}, "all 5"),
        ({"replace": True}, "nothing"),
    ],
)
def test_a_request_branches_from_any_turn_and_any_place(
    fields: dict[str, object], kept: str
) -> None:
    world = Scene()
    world.open()
    first = world.say(prompt(10), rid="first")
    world.run_dry()
    second = world.say(prompt(4, 30))
    world.prompts[second] = prompt(10) + world.outputs[first] + prompt(4, 30)
    world.run_dry()
    base, _, cut = kept.partition(" ")
    history = {"all": world.turn_of(second), "first": world.turn_of(first), "nothing": []}[base]
    options = {"session": SessionParams(id="s", **fields)}  # type: ignore[arg-type]
    third = world.send(prompt(5, 70), max_new_tokens=3, ignore_eos=True, rid="third", **options)  # type: ignore[arg-type]
    world.prompts[third] = history[: int(cut) if cut else None] + prompt(5, 70)
    world.run_dry()
    world.check_outputs()
    assert world.turn_of(third) == world.prompts[third] + world.outputs[third]


def test_branches_of_one_turn_run_side_by_side() -> None:
    world = Scene()
    world.open()
    root = world.say(prompt(12), rid="root")
    world.run_dry()
    history = prompt(12) + world.outputs[root]
    branches = [
        world.send([60 + n], session=SessionParams(id="s", rid="root"), max_new_tokens=4)
        for n in range(3)
    ]
    for n, id in enumerate(branches):
        world.prompts[id] = [*history, 60 + n]
    world.step()
    assert len(world.scheduler.requests) == 3
    world.run_dry()
    world.check_outputs()


def test_replacing_forgets_what_followed_and_ends_what_still_runs_there() -> None:
    world = Scene()
    world.open()
    for name in ("root", "old"):
        world.say([20], rid=name)
        world.run_dry()
    running = world.send(
        [30],
        session=SessionParams(id="s", rid="old"),
        rid="running",
        max_new_tokens=50,
        ignore_eos=True,
    )
    world.step()
    new = world.send(
        [40], session=SessionParams(id="s", rid="root", replace=True), rid="new", max_new_tokens=2
    )
    world.run_dry()
    assert world.finished[running].reason == "abort"
    assert "'new' of its session replaces it" in world.finished[running].message
    assert set(world.sessions.by_name["s"].turns) == {"root", "new"}
    assert world.turn_of(new)[-3] == 40
    gone = world.send([50], session=SessionParams(id="s", rid="old"), max_new_tokens=2)
    assert world.why_not(gone) == (400, "session 's' has no turn 'old'; the last one is 'new'")


def test_a_refused_request_replaces_nothing() -> None:
    world = Scene(max_tokens=40)
    world.open()
    world.say([20], rid="root")
    world.run_dry()
    id = world.say(prompt(60), replace=True)
    assert world.why_not(id)[0] == 400
    assert set(world.sessions.by_name["s"].turns) == {"root"}


def test_an_aborted_turn_leaves_no_trace() -> None:
    world = Scene()
    world.open()
    first = world.say(prompt(5), rid="first")
    world.run_dry()
    aborted = world.say(prompt(5, 40), rid="second", max_new=50)
    for _ in range(4):
        world.step()
    world.abort(Abort(ids=(aborted,)))
    again = world.say(prompt(5, 40), rid="second")
    world.prompts[again] = prompt(5) + world.outputs[first] + prompt(5, 40)
    world.prompts[aborted] = world.prompts[again]
    world.run_dry()
    world.check_outputs()
    assert world.sessions.by_name["s"].num_tokens == len(world.turn_of(again))


@pytest.mark.parametrize("is_over", [False, True])
def test_what_comes_behind_a_stop_string_is_no_history(is_over: bool) -> None:
    world = Scene()
    world.open()
    first = world.say(prompt(5), max_new=8)
    while len(world.outputs[first]) < 4:
        world.step()
    if is_over:
        world.run_dry()
    world.abort(Abort(ids=(first,), output_lens=(3,)))
    second = world.say([90])
    world.prompts[second] = [*prompt(5), *world.outputs[first][:3], 90]
    world.run_dry()
    world.check_outputs()
    assert world.finished[second].prompt_tokens == 9


def test_the_beginning_token_is_left_out_behind_a_history() -> None:
    world = Scene()
    world.open()
    params = SessionParams(id="s", bos_token_id=1)
    first = world.send([1, 20, 21], session=params, max_new_tokens=2, ignore_eos=True)
    world.run_dry()
    second = world.send([1, 22], session=params, max_new_tokens=2, ignore_eos=True)
    world.run_dry()
    assert world.turn_of(second) == [1, 20, 21, *world.outputs[first], 22, *world.outputs[second]]


def test_a_request_that_has_no_place_in_its_session_is_refused_with_the_reason() -> None:
    world = Scene(max_turns=2, max_tokens=60)
    unknown = world.say([20], "none")
    world.open(capacity=40)
    world.say(prompt(10), rid="first", max_new=6)
    world.run_dry()
    running = world.say([20], rid="running", max_new=9)
    world.step()
    cases = {
        unknown: (404, "there is no session 'none': it was never opened, or it has been closed"),
        world.say([20]): (
            409,
            "the turn 'running' of session 's' is still running; name the one to continue as rid",
        ),
        world.send([20], session=SessionParams(id="s", rid="running")): (
            409,
            "the turn 'running' of session 's' is still running",
        ),
        world.send([20], session=SessionParams(id="s", rid="first"), rid="running"): (
            400,
            "session 's' has a turn 'running' already",
        ),
        world.send([20], session=SessionParams(id="s", rid="first")): (
            400,
            "session 's' has 2 turns, as many as --max-session-turns allows",
        ),
        world.send([20], session=SessionParams(id="s", rid="first", offset=17, replace=True)): (
            400,
            "offset is 17; 'first' has 16 tokens of history",
        ),
        world.send(
            [20] * 20, session=SessionParams(id="s", rid="first", replace=True), max_new_tokens=5
        ): (
            400,
            "session 's' has room for 24 of its 40 tokens; 20 come in and 5 are to be generated",
        ),
    }
    world.run_dry()
    assert {id: (world.finished[id].status, world.finished[id].message) for id in cases} == cases
    assert world.finished[running].reason == "length"


def test_a_request_without_a_length_ends_where_its_session_is_full() -> None:
    world = Scene()
    world.open(capacity=30)
    id = world.say(prompt(10), max_new=None)
    world.run_dry()
    assert world.finished[id].reason == "length"
    assert world.finished[id].completion_tokens == 20
    assert world.why_not(world.say([5], max_new=None))[0] == 400


def test_a_session_is_opened_once_and_within_the_limits() -> None:
    world = Scene(max_sessions=2, max_tokens=500, timeout_s=60.0)
    assert world.open("a", capacity=500, timeout_s=60.0) == ""
    assert world.open("a") == "the session 'a' is open already"
    assert world.open("") == "a session needs an id"
    assert world.open("b", capacity=501) == "the capacity is 501 tokens; 1 to 500 are allowed"
    assert world.open("b", timeout_s=61.0) == "the timeout is 61 s; at most 60 s are allowed"
    assert world.open("b") == ""
    assert world.open("c") == "2 sessions are open, as many as --max-sessions allows"
    world.close("a")
    assert world.open("c") == ""


def test_closing_an_unknown_session_is_answered_false_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Scene()
    reply = world.close("none")
    assert not reply.success
    assert reply.message.startswith("there is no session 'none'")
    assert [record.getMessage() for record in caplog.records] == ["not_closed"]


def test_a_session_is_closed_when_its_last_request_has_ended_and_takes_no_other() -> None:
    world = Scene()
    world.open()
    first = world.say(prompt(20))
    world.step()
    reply = world.close()
    assert reply.success
    assert reply.message == "it is closed when its running requests have ended"
    refused = world.say([5])
    world.run_dry()
    assert world.finished[refused].status == 409
    assert world.finished[refused].message == "the session 's' is being closed"
    assert world.finished[first].completion_tokens == 6
    assert "s" not in world.sessions
    assert world.scheduler.kv.cache.pinned_pages == 0
    assert not world.sessions._by_id


def test_an_idle_session_is_closed_after_its_time_and_a_running_one_is_not() -> None:
    world = Scene(timeout_s=100.0)
    world.open("short", timeout_s=20.0)
    world.open("long")
    id = world.say(prompt(8), "short", max_new=40)
    world.run_dry()
    assert world.finished[id].reason == "length"  # 40 steps of a second each
    assert "short" in world.sessions
    world.time += 18
    world.step()
    assert "short" in world.sessions
    assert world.engine.wait_s == 1.0  # an idle engine wakes up for it
    world.step()
    assert "short" not in world.sessions
    assert "long" in world.sessions
    assert world.engine.wait_s == 40.0
    assert world.scheduler.kv.cache.pinned_pages == 0
    assert world.why_not(world.say([5], "short"))[0] == 404


def test_the_kv_of_a_session_outlives_what_is_only_cached() -> None:
    world = Scene(num_pages=30)
    world.open()
    world.say(prompt(40))
    world.run_dry()
    for n in range(6):
        world.send([100 + n] * 60, max_new_tokens=4, ignore_eos=True)
        world.run_dry()
    second = world.say([5])
    world.run_dry()
    assert world.finished[second].cached_tokens == 44


def test_the_least_recently_used_session_gives_way_before_anybody_waits_or_is_taken_back() -> None:
    world = Scene(num_pages=30)  # 120 tokens
    for name, first in (("old", 10), ("new", 60)):
        world.open(name)
        world.say(prompt(30, first), name)
        world.run_dry()
    assert world.scheduler.kv.cache.pinned_pages == 16
    id = world.send([5] * 70, max_new_tokens=6, ignore_eos=True)
    world.run_dry()
    assert world.scheduler.stats().total_retractions == 0
    assert [world.sessions.by_name[name].dropped is not None for name in ("old", "new")] == [
        True,
        False,
    ]
    explained = insight.explain(world.scheduler, id, world.time)
    assert explained is not None
    assert explained.stages.queued_s == 1  # until the next step
    back = [world.say([7], name) for name in ("new", "old")]
    world.run_dry()
    assert [world.finished[one].cached_tokens for one in back] == [
        32,
        12,
    ]  # no more was taken than was needed
    texts = [
        "\n".join(map(str, insight.explain(world.scheduler, one, world.time).timeline))
        for one in back
    ]  # type: ignore[union-attr]
    assert "session: turn 2 of 'new': 36 tokens of history, 1 new\n" in texts[0]
    assert re.search(
        r"; KV of 32 was dropped before step 13, \d.000 s ago: its memory was needed\n", texts[1]
    )


def test_a_running_request_outgrows_sessions_without_being_taken_back() -> None:
    world = Scene(num_pages=20)
    world.open()
    world.say(prompt(40))
    world.run_dry()
    id = world.send([5] * 10, max_new_tokens=60, ignore_eos=True)
    world.run_dry()
    assert world.finished[id].completion_tokens == 60
    assert world.scheduler.stats().total_retractions == 0


@pytest.mark.parametrize("emptied_by", ["flush", "failure"])
def test_emptying_the_cache_takes_the_kv_and_leaves_the_session(emptied_by: str) -> None:
    world = Scene(fail_steps={8} if emptied_by == "failure" else None)
    world.open()
    first = world.say(prompt(20))
    world.run_dry()
    assert world.scheduler.kv.cache.pinned_pages == 6
    if emptied_by == "flush":
        world.tell(FlushCache(call=1))
        world.step()
    else:
        world.send([5], max_new_tokens=9)
        world.run_dry()
        assert world.failures
    assert world.scheduler.kv.cache.pinned_pages == 0
    second = world.say([90])
    world.prompts[second] = [*prompt(20), *world.outputs[first], 90]
    world.run_dry()
    assert world.finished[second].cached_tokens == 0
    assert world.outputs[second]
    told = insight.explain(world.scheduler, second, world.time)
    assert told is not None
    assert "the cache was emptied" in "\n".join(map(str, told.timeline))


def test_sessions_work_without_a_prefix_cache() -> None:
    world = Scene(prefix_cache=False)
    world.open()
    first = world.say(prompt(20))
    world.run_dry()
    second = world.say([90])
    world.prompts[second] = [*prompt(20), *world.outputs[first], 90]
    world.run_dry()
    world.check_outputs()
    assert world.finished[second].cached_tokens == 0
    assert world.close().success
    world.check_idle()


def test_what_sessions_hold_is_counted_and_their_requests_are_listed() -> None:
    world = Scene()
    world.open()
    world.open("other")
    world.say(prompt(20))
    world.run_dry()
    stats = world.engine._engine.services.stats()
    assert stats.num_sessions == 2
    assert stats.kv_held == 24
    assert stats.kv_used == 0
    world.say([5], max_new=20, rid="mine")
    world.send([6], max_new_tokens=20, rid="nobody's")
    world.step()
    reply = world.engine.submit(ListRequests(call=1))
    assert isinstance(reply, ListRequestsReply)
    assert reply.queue.sessions == 2
    assert {row.rid: row.session for row in reply.requests} == {"mine": "s", "nobody's": ""}


@pytest.mark.parametrize("puts_aside", [False, True])
def test_a_journal_with_sessions_is_replayed(puts_aside: bool) -> None:
    world = Scene(depth=1)
    if puts_aside:
        world.put_aside_often()
    world.open()
    world.say(prompt(20))
    world.run_dry()
    world.say([5])
    world.run_dry()
    world.close()
    world.step()
    world.replay(check=True)


def test_at_the_end_of_all_sessions_nothing_is_held() -> None:
    world = Scene(num_pages=40)
    for n in range(5):
        world.open(str(n))
        world.say(prompt(20, 10 * n), str(n))
    world.run_dry()
    assert world.scheduler.kv.cache.pinned_pages == 30
    for n in range(5):
        world.close(str(n))
    world.check()
    world.check_idle()
    assert world.scheduler.kv.cache.pinned_pages == 0
    assert world.scheduler.kv.cache.evictable_pages == 30


@pytest.mark.parametrize("seed", range(10))
def test_the_history_of_a_turn_is_the_beginning_of_its_conversation(seed: int) -> None:
    """Against whole conversations, in a tree of turns that branch at any place."""
    rng = random.Random(f"turns {seed}")
    session = Session("s", "", 10_000, 0.0, 0.0)
    turns: list[SessionTurn] = []
    whole: list[list[int]] = []  # all tokens up to each turn, its own among them
    for id in range(12):
        parent = rng.choice([None, *turns])
        before: list[int] = []
        if parent is not None:
            before = whole[parent.id]
            before = before[: rng.randrange(len(before) + 1)]
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
        packed = np.array(tokens, dtype=np.int32).tobytes()
        turns.append(SessionTurn(id, f"r{id}", session, parent, len(before), packed, 4))
        whole.append(before + tokens)
    for turn in turns:
        assert turn.length == len(whole[turn.id])
        for end in range(turn.length + 1):
            found = np.frombuffer(turn.history(end), dtype=np.int32).tolist()
            assert found == whole[turn.id][:end]
