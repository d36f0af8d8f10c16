"""When a line is asked again."""

from __future__ import annotations

from weft.batches.tries import NOT_LOADED, Tries


def test_a_full_server_is_asked_until_it_has_room_ever_more_seldom() -> None:
    tries = Tries()
    waits = [tries.wait_s(503 if number % 2 else 429) for number in range(8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert tries.wait_s(200) is None


def test_a_fault_is_tried_three_times_in_all() -> None:
    tries = Tries()
    assert [tries.wait_s(status) for status in (500, 502, 504)] == [0.5, 1.0, None]


def test_a_model_that_cannot_be_loaded_is_a_fault() -> None:
    tries = Tries()
    waits = [tries.wait_s(503, code) for code in ("", NOT_LOADED, NOT_LOADED, NOT_LOADED)]
    assert waits == [0.5, 1.0, 2.0, None]


def test_an_error_of_the_line_is_its_result() -> None:
    assert Tries().wait_s(400) is None
