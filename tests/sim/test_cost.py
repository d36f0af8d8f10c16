from __future__ import annotations

import numpy as np
import pytest

from weft.sim.cost import PRESETS, TrueLengths, VirtualClock
from weft.sim.gaps import Gaps


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.wait_until(5.0)
    clock.wait_until(3.0)
    assert clock() == 5.0


def test_true_lengths_know_the_last_position_of_each_request() -> None:
    lengths = TrueLengths()
    lengths.add(3, 10)
    lengths.add(100_000, 20)
    numbers = np.array([3, 3, 100_000])
    positions = np.array([9, 10, 20], dtype=np.int32)
    assert lengths.reached(numbers, positions).tolist() == [False, True, True]


def test_presets_have_a_price_for_everything() -> None:
    for cost in PRESETS.values():
        assert min(cost[:3]) > 0


def test_percentiles_of_gaps_are_exact_to_one_percent() -> None:
    drawn = np.random.default_rng(0).lognormal(-4, 1, 300_000)
    gaps = Gaps()
    for part in np.array_split(drawn, 1_000):
        gaps.add(np.append(part, np.nan))
    for percent in (1, 50, 90, 99):
        assert gaps.percentile(percent) == pytest.approx(np.percentile(drawn, percent), rel=0.011)


def test_no_gaps_have_no_percentile() -> None:
    assert np.isnan(Gaps().percentile(50))


def test_gaps_of_any_size_are_counted() -> None:
    gaps = Gaps()
    gaps.add(np.array([0.0, 1e9]))
    assert gaps.percentile(1) < 1e-6
    assert gaps.percentile(99) > 1e3
