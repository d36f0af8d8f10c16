"""When an engine is taken to hang, in ticks of half a second."""

from __future__ import annotations

import pytest

from weft.client.hang_detector import BUSY_TICKS, HANG_AFTER_S, TICK_S, Pulse
from weft.messages.control import Heartbeat

TICKS = int(HANG_AFTER_S / TICK_S)


def test_case_35_silence_is_a_hang_within_five_seconds_and_ends_with_a_word() -> None:
    pulse = Pulse()
    for _ in range(TICKS - 1):
        pulse.tick()
    assert not pulse.hang
    pulse.tick()
    assert "no sign of life for 4 s" in pulse.hang
    assert TICKS * TICK_S < 5
    pulse.heard()
    assert not pulse.hang


def test_case_35_on_a_machine_that_is_too_busy_for_both_silence_counts_little_but_it_counts() -> (
    None
):
    for late in ({"passed_s": 3 * TICK_S}, {"is_engine_queued": True}):
        pulse = Pulse()
        for _ in range(TICKS):
            pulse.tick(**late)
        assert not pulse.hang
        for _ in range(TICKS * (BUSY_TICKS - 1)):
            pulse.tick(**late)
        assert "no sign of life" in pulse.hang
        pulse.heard()
        for _ in range(TICKS):
            pulse.tick(TICK_S * 1.1)
        assert "no sign of life" in pulse.hang


def test_a_long_step_that_computes_is_no_hang() -> None:
    pulse = Pulse(step_timeout_s=300)
    for second in range(299):
        pulse.heard()
        pulse.beat(Heartbeat(step_s=float(second), idle_s=0.0))
        pulse.tick()
        assert not pulse.hang


def test_case_35_a_step_that_waits_without_computing_is_a_hang() -> None:
    pulse = Pulse()
    pulse.beat(Heartbeat(step_s=3.5, idle_s=3.5))
    assert not pulse.hang
    pulse.beat(Heartbeat(step_s=4.0, idle_s=4.0))
    assert "stood still in a step for 4 s" in pulse.hang


def test_an_engine_that_has_nothing_to_do_does_not_hang() -> None:
    pulse = Pulse(step_timeout_s=1)
    pulse.beat(Heartbeat(step_s=0.0, idle_s=3600.0))
    assert not pulse.hang


def test_a_step_has_its_longest_time_if_one_is_set() -> None:
    for bound, is_hang in ((300.0, True), (0.0, False)):
        pulse = Pulse(step_timeout_s=bound)
        pulse.beat(Heartbeat(step_s=301.0, idle_s=0.0))
        assert bool(pulse.hang) == is_hang


@pytest.mark.parametrize("hang_after_s", [1.0, 4.0, 30.0, 600.0])
def test_silence_and_standstill_have_one_time_which_can_be_set(hang_after_s: float) -> None:
    silent, still = Pulse(hang_after_s=hang_after_s), Pulse(hang_after_s=hang_after_s)
    for tick in range(int(hang_after_s / TICK_S)):
        still.heard()
        still.beat(Heartbeat(step_s=tick * TICK_S, idle_s=tick * TICK_S))
        assert not silent.hang
        assert not still.hang
        silent.tick()
    still.beat(Heartbeat(step_s=hang_after_s, idle_s=hang_after_s))
    assert silent.hang
    assert still.hang
