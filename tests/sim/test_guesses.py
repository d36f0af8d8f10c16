"""Guesses whose outcomes are given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.capacity.machines import ids
from weft.engine.engine import Engine
from weft.scheduler.history import DraftCount
from weft.scheduler.settings import SchedulerSettings
from weft.sim.curve import StepCurve
from weft.sim.guesses import LONG_RIGHT, LONG_WRONG, NO_GUESS, SHORT_RIGHT, SHORT_WRONG
from weft.sim.run import Record, simulate
from weft.sim.trace import EOS, Arrival

# A guess pays if it is right one time in ten.
CURVE = StepCurve(step_s=0.01, knots=(1,), token_s=(1e-3,))
LEN = 200


def settings(**changes: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "num_pages": 200,
        "page_size": 16,
        "max_running_requests": 4,
        "context_length": 1_000,
        "vocab_size": 1_000,
        "eos_token_ids": (EOS,),
        "speculative": "ngram",
    }
    return SchedulerSettings(**{**values, **changes})


def ran(guesses: bytes, **changes: Any) -> tuple[Record, DraftCount]:
    """One output with these outcomes."""
    engines: list[Engine] = []

    def keep(engine: Engine, clock: object) -> Engine:
        engines.append(engine)
        return engine

    arrival = Arrival(
        time_s=0.0,
        prompt=ids(*range(100, 120)),
        output_len=LEN,
        max_new_tokens=LEN,
        ignore_eos=True,
        guesses=guesses,
    )
    record = simulate(settings(**changes), CURVE, [arrival], overlap=False, around=keep)
    return record, engines[0].scheduler.counters.drafts["ngram"]


def test_as_many_guesses_are_right_as_the_script_says() -> None:
    record, count = ran(bytes([LONG_RIGHT]) * LEN)
    assert record.output_len.tolist() == [LEN]
    assert count.num_right == count.num_drafts > LEN / 2
    assert record.machine.meter.num_steps < LEN / 2


@pytest.mark.parametrize("wrong", [LONG_WRONG, SHORT_WRONG])
def test_wrong_guesses_become_rare(wrong: int) -> None:
    record, count = ran(bytes([wrong]) * LEN)
    assert record.output_len.tolist() == [LEN]
    assert count.num_right == 0
    assert 0 < count.num_drafts < LEN / 4


def test_where_there_is_no_guess_none_is_made() -> None:
    record, count = ran(bytes([NO_GUESS]) * LEN)
    assert count.num_drafts == 0
    assert record.machine.meter.num_steps == LEN


def test_a_guess_ends_with_the_first_wrong_token() -> None:
    pattern = bytes([SHORT_RIGHT, LONG_RIGHT, LONG_RIGHT, LONG_WRONG])
    record, count = ran(pattern * (LEN // 4))
    assert record.output_len.tolist() == [LEN]
    assert LEN / 4 < count.num_right <= 3 * LEN / 4


def test_guesses_of_short_pieces_need_their_source() -> None:
    _, count = ran(bytes([SHORT_RIGHT]) * LEN, ngram_min=3)
    assert count.num_drafts == 0
    _, count = ran(bytes([SHORT_RIGHT]) * LEN)
    assert count.num_right > LEN / 2


def test_without_a_script_the_text_is_searched() -> None:
    _, count = ran(b"")
    # Fillers repeat themselves.
    assert count.num_right > LEN / 2
