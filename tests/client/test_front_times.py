"""The front's part of the time of a request: with the engine's, all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.examples import example_of
from weft.client.front_times import SHARE, FrontTimes, on_this_clock, with_front
from weft.messages.control import Explanation, StageTimes, TimePart

BUSY = "step 7 took 0.500 s: 30 prompt tokens of guest"


def told(**known: Any) -> Explanation:
    """A request that took the engine a second from when it read it, on the clock of the front."""
    fields: dict[str, Any] = {
        "stages": StageTimes(queued_s=0.25, prefill_s=0.5, decode_s=0.25, total_s=1.0),
        "times": [TimePart(part="queue", seconds=0.25), TimePart(part="prefill", seconds=0.75)],
        "arrived_s": 10.5,
        "busy_until_s": 10.4375,
        "busy_with": BUSY,
        "total_s": None,
        "first_token_s": None,
        **known,
    }
    one = example_of(Explanation, **fields)
    assert isinstance(one, Explanation)
    return one


def front(**known: Any) -> FrontTimes:
    """It came at 9.0, was sent at 10.0, and the last token was here at 12.0."""
    fields: dict[str, Any] = {"started_s": 10.0, "first_s": 11.5, "ended_s": 12.0, "sent_s": 12.25}
    return FrontTimes(9.0, {"read": 0.25, "parse": 0.5}, **{**fields, **known})


def parts(one: Explanation) -> dict[str, float]:
    assert one.total_s == sum(part.seconds for part in one.times)
    return {part.part: part.seconds for part in one.times}


def test_all_parts_are_the_whole_time_in_order() -> None:
    one = with_front(told(), front(), now=99.0)
    assert list(parts(one).items()) == [
        ("read", 0.25),
        ("parse", 0.5),
        ("front", 0.25),
        ("engine_busy", 0.5),
        ("queue", 0.25),
        ("prefill", 0.75),
        ("dispatch", 0.5),
        ("sending", 0.25),
    ]
    assert (one.total_s, one.first_token_s) == (12.25 - 9.0, 11.5 - 9.0)
    (busy,) = [part for part in one.times if part.part == "engine_busy"]
    assert busy.detail == BUSY


def test_a_step_that_had_ended_before_it_was_sent_has_kept_nobody_waiting() -> None:
    one = with_front(told(busy_until_s=9.9375), front(), now=99.0)
    assert "engine_busy" not in parts(one)
    assert parts(one)["dispatch"] == 1.0


@pytest.mark.parametrize(("arrived_s", "busy_s"), [(13.0, 1.0), (9.5, None)])
def test_a_clock_that_is_wrong_changes_no_sum(arrived_s: float, busy_s: float | None) -> None:
    one = with_front(told(arrived_s=arrived_s, busy_until_s=arrived_s), front(), now=99.0)
    assert parts(one).get("engine_busy") == busy_s
    assert one.total_s == 12.25 - 9.0


def test_a_completion_waits_for_others_of_its_request() -> None:
    one = with_front(told(), front(deferred_s=9.875, answered_s=12.125), now=99.0)
    found = parts(one)
    assert (found["front"], found["share"]) == (0.125, 0.125)
    assert (found["siblings"], found["sending"]) == (0.125, 0.125)
    assert [part.detail for part in one.times if part.part == "share"] == [SHARE]


def test_an_open_request_has_its_time_so_far() -> None:
    one = with_front(told(), front(first_s=0.0, ended_s=0.0, sent_s=0.0), now=11.75)
    assert one.total_s == 11.75 - 9.0
    assert one.first_token_s is None


def test_work_of_the_engine_after_its_client_has_left_is_told() -> None:
    one = with_front(told(busy_with="", busy_until_s=-1.0), front(ended_s=10.5, sent_s=10.5), 99.0)
    assert parts(one)["prefill"] == 0.75
    assert one.total_s == 10.0 - 9.0 + 1.0


def test_times_of_another_machine_are_put_on_the_clock_of_the_front() -> None:
    here = on_this_clock(told(explained_s=50.0), 49.5, 50.5)
    assert (here.arrived_s, here.busy_until_s) == (10.5, 10.4375), "it may be the same clock"
    there = on_this_clock(told(explained_s=1_000.0), 49.5, 50.5)
    assert (there.arrived_s, there.busy_until_s) == (10.5 - 950.0, 10.4375 - 950.0)
    idle = on_this_clock(told(explained_s=1_000.0, busy_until_s=-1.0, busy_with=""), 49.5, 50.5)
    assert idle.busy_until_s == -1.0
