"""When an engine is taken to hang, in ticks of half a second."""

from __future__ import annotations

import pytest

from weft.client.engine_state import HANG_AFTER_S, LEAST_COUNTED, TICK_S, HangDetector
from weft.messages.status import Heartbeat

TICKS = int(HANG_AFTER_S / TICK_S)


def test_silence_is_a_hang_within_five_seconds_and_ends_with_a_word() -> None:
    detector = HangDetector()
    for _ in range(TICKS - 1):
        detector.tick()
    assert not detector.hang
    detector.tick()
    assert "no sign of life for 4 s" in detector.hang
    assert TICKS * TICK_S < 5
    detector.heard()
    assert not detector.hang


@pytest.mark.parametrize(
    ("late", "num_ticks"),
    [
        ({"passed_s": 3 * TICK_S}, TICKS / LEAST_COUNTED),
        ({"processor_share": 0.0}, TICKS / LEAST_COUNTED),
        ({"processor_share": 1 / 16}, TICKS * 16),
        ({"processor_share": 0.5}, TICKS * 2),
        ({"passed_s": TICK_S * 1.1}, TICKS),
        ({"passed_s": TICK_S + 0.25}, TICKS),
        ({"passed_s": TICK_S + 0.26}, TICKS / LEAST_COUNTED),
    ],
)
def test_silence_counts_only_while_the_engine_gets_a_processor(
    late: dict[str, float], num_ticks: float
) -> None:
    detector = HangDetector()
    for _ in range(round(num_ticks) - 1):
        detector.tick(**late)
        assert not detector.hang
        assert detector.is_silent
    detector.tick(**late)
    assert f"no sign of life for {num_ticks * TICK_S:.0f} s" in detector.hang
    detector.heard()
    assert not detector.hang
    assert not detector.is_silent


def test_engines_that_wait_for_a_computing_one_are_not_taken_for_hung() -> None:
    detectors = [HangDetector() for _ in range(3)]
    for one in detectors:
        one.accompany(detectors)
    still = Heartbeat(step_s=4.0, idle_s=4.0)
    detectors[0].beat(Heartbeat(step_s=4.0, idle_s=0.0))
    detectors[1].beat(still)
    detectors[2].beat(Heartbeat(step_s=0.0, idle_s=60.0))
    assert not any(one.hang for one in detectors)
    detectors[0].beat(still)
    detectors[1].beat(still)
    assert detectors[0].hang
    assert detectors[1].hang
    assert not detectors[2].hang


def test_a_long_step_that_computes_is_no_hang() -> None:
    detector = HangDetector(step_timeout_s=300)
    for second in range(299):
        detector.heard()
        detector.beat(Heartbeat(step_s=float(second), idle_s=0.0))
        detector.tick()
        assert not detector.hang


def test_a_step_that_waits_without_computing_is_a_hang() -> None:
    detector = HangDetector()
    detector.beat(Heartbeat(step_s=3.5, idle_s=3.5))
    assert not detector.hang
    detector.beat(Heartbeat(step_s=4.0, idle_s=4.0))
    assert "made no progress in a step for 4 s" in detector.hang


def test_an_engine_that_has_nothing_to_do_does_not_hang() -> None:
    detector = HangDetector(step_timeout_s=1)
    detector.beat(Heartbeat(step_s=0.0, idle_s=3600.0))
    assert not detector.hang


def test_a_step_has_its_longest_time_if_one_is_set() -> None:
    for bound, is_hang in ((300.0, True), (0.0, False)):
        detector = HangDetector(step_timeout_s=bound)
        detector.beat(Heartbeat(step_s=301.0, idle_s=0.0))
        assert bool(detector.hang) == is_hang


@pytest.mark.parametrize("hang_after_s", [1.0, 4.0, 30.0, 600.0])
def test_silence_and_standstill_have_one_time_which_can_be_set(hang_after_s: float) -> None:
    silent = HangDetector(hang_after_s=hang_after_s)
    still = HangDetector(hang_after_s=hang_after_s)
    for tick in range(int(hang_after_s / TICK_S)):
        still.heard()
        still.beat(Heartbeat(step_s=tick * TICK_S, idle_s=tick * TICK_S))
        assert not silent.hang
        assert not still.hang
        silent.tick()
    still.beat(Heartbeat(step_s=hang_after_s, idle_s=hang_after_s))
    assert silent.hang
    assert still.hang
