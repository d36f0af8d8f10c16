"""What users send, and recorded traffic at other rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tests.capacity.machines import CURVE, SETTINGS, USERS
from weft.capacity.guesses import learn_guesses
from weft.capacity.workload import RecordedTraffic
from weft.sim.run import simulate
from weft.sim.trace import Arrival


def _ids(arrival: Arrival) -> bytes:
    assert isinstance(arrival.prompt, bytes)
    return arrival.prompt


def test_each_message_of_a_chat_continues_the_one_before_it() -> None:
    arrivals = replace(USERS, turns=3, requests=40).arrivals(5)
    num_continued = 0
    for arrival in arrivals:
        if arrival.after < 0:
            continue
        before = arrivals[arrival.after]
        num_continued += _ids(arrival).startswith(_ids(before) + before.output)
    followers = sum(arrival.after >= 0 for arrival in arrivals)
    assert followers == 35
    assert followers / 2 < num_continued < followers  # a third begins a new chat


def test_messages_come_when_their_users_send_them_and_not_after_all_first_ones() -> None:
    arrivals = replace(USERS, think_s=20.0, requests=40).arrivals(5)
    for number, arrival in enumerate(arrivals):
        assert arrival.after in (-1, number - 1)
    record = simulate(SETTINGS, CURVE, arrivals)
    waits_s = record.first_s - record.sent_s
    assert max(waits_s) < 1.0


def test_more_users_are_the_same_users_and_others() -> None:
    few = {arrival.prompt for arrival in replace(USERS, requests=1).arrivals(4)}
    many = {arrival.prompt for arrival in replace(USERS, requests=1).arrivals(9)}
    assert few < many


def test_chats_begin_with_what_all_share_and_end_before_the_context() -> None:
    users = replace(USERS, shared_len=50, context_length=200, turns=20, requests=60)
    arrivals = users.arrivals(3)
    head = arrivals[0].prompt[:200]
    for arrival in arrivals:
        assert arrival.prompt[:200] == head
        assert arrival.prompt_len + arrival.output_len <= 200


def test_guesses_of_each_answer_are_given_if_the_model_was_measured() -> None:
    assert all(not arrival.guesses for arrival in USERS.arrivals(2))
    model = learn_guesses([], longest=4, shortest=2)
    known = replace(USERS, guesses=model).arrivals(2)
    assert [len(arrival.guesses) for arrival in known] == [one.output_len for one in known]
    assert [arrival._replace(guesses=b"") for arrival in known] == USERS.arrivals(2)


def test_levels_go_up_one_by_one_and_then_by_a_tenth() -> None:
    levels = USERS.levels
    assert levels[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert all(low < high <= 1.1 * low + 1 for low, high in pairwise(levels))


def test_recorded_traffic_comes_faster_at_a_higher_level() -> None:
    recorded = [
        Arrival(time_s=2.0, prompt=b"", output_len=1, max_new_tokens=1),
        Arrival(time_s=3.0, prompt=b"", output_len=1, max_new_tokens=1, after=0),
    ]
    faster = RecordedTraffic(recorded=recorded).arrivals(4.0)
    assert [arrival.time_s for arrival in faster] == [0.5, 3.0]
    assert 1.0 in RecordedTraffic(recorded=recorded).levels
