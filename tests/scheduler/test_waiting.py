"""The columns of the waiting requests against a plain list of them."""

from __future__ import annotations

import random

import pytest

from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


def request_of(number: int, rng: random.Random) -> Request:
    prompt_len = rng.randrange(1, 20)
    message = GenerateRequest(
        id=number,
        rid=f"r{number}",
        input_ids=bytes(4 * prompt_len),
        sampling=SamplingParams(),
        priority=rng.randrange(-3, 4),
    )
    max_len = prompt_len + rng.randrange(9)
    return Request(message, max_len=max_len, seed=0, arrival_order=number, arrival_s=number / 2)


def compare(
    waiting: WaitingTable, expected: list[Request], notes: dict[int, tuple[int, int]]
) -> None:
    """`notes` are the cached length and the tag of each, by its number."""
    lines = waiting.indices()
    assert list(waiting) == [waiting.request_at(line) for line in lines.tolist()] == expected
    assert waiting.arrival_order[lines].tolist() == [one.spec.arrival_order for one in expected]
    assert waiting.arrival_s[lines].tolist() == [one.spec.arrival_s for one in expected]
    assert waiting.fill_len[lines].tolist() == [one.fill_len for one in expected]
    assert waiting.max_len[lines].tolist() == [one.max_len for one in expected]
    assert waiting.priority[lines].tolist() == [one.message.priority for one in expected]
    found = zip(waiting.cached_len[lines].tolist(), waiting.tag[lines].tolist(), strict=True)
    assert list(found) == [notes[one.spec.arrival_order] for one in expected]


@pytest.mark.parametrize("seed", range(4))
def test_the_columns_have_every_request_that_came_and_has_not_left(seed: int) -> None:
    rng = random.Random(f"waiting {seed}")
    waiting = WaitingTable()
    expected = list[Request]()
    notes: dict[int, tuple[int, int]] = {}
    for number in range(500):
        request = request_of(number, rng)
        waiting.append(request)
        expected.append(request)
        notes[number] = rng.randrange(9), rng.randrange(9)
        waiting.set_cached_len(number, notes[number][0])
        waiting.set_tag(number, notes[number][1])
        leave = rng.choice([0.2, 0.5, 1.0]) if number % 100 < 80 else 3.0
        while expected and rng.random() < leave / 2:
            gone = expected.pop(rng.randrange(len(expected)))
            waiting.discard(gone)
            assert gone not in waiting
        if number % 5 == 0:
            compare(waiting, expected, notes)
    compare(waiting, expected, notes)


def test_arrivals_by_a_moment_are_at_it_or_before() -> None:
    rng = random.Random(2)
    waiting = WaitingTable()
    for number in range(40):
        waiting.append(request_of(number, rng))  # at number / 2
    for number in range(0, 40, 3):
        waiting.discard(waiting.request_at(waiting.index_by_arrival(number)))
    left = [number for number in range(40) if number % 3]
    for time_s in (0.0, 0.5, 0.75, 5.0, 9.0, 19.4, 19.5, 30.0):
        came = [number for number in left if number / 2 <= time_s]
        assert [one.id for one in waiting.came_by(time_s)] == came
        assert [number for number in left if number < waiting.end_by(time_s)] == came
    assert [one.id for one in waiting.came_by(30.0, 5)] == [1, 2, 4]


@pytest.mark.parametrize("num_waiting", [1, 40, 1_000])
def test_room_is_made_once_for_many_that_come(
    num_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time every line is copied; so it may not happen more often than there are lines that
    came since."""
    made = []
    make_room = WaitingTable._make_room
    monkeypatch.setattr(WaitingTable, "_make_room", lambda self: (made.append(1), make_room(self)))
    rng = random.Random(0)
    waiting = WaitingTable()
    for number in range(4_000):
        waiting.append(request_of(number, rng))
        if number >= num_waiting:
            waiting.discard(waiting.request_at(waiting.index_by_arrival(number - num_waiting)))
    assert len(made) <= 10 + 4_000 / max(num_waiting, 32)
