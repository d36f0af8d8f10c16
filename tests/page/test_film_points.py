"""What a picture of a recording has of the time before it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.cli.film import NUM_POINTS, SPAN_S, Film, Frame


def film(num_frames: int, frame_s: float) -> Film:
    frames = [Frame(n, n * frame_s, b"", {"at_s": 7 + n * frame_s}) for n in range(num_frames)]
    return Film("a film", "", frames, 1, lambda rid: [])


@pytest.mark.parametrize("frame_s", [0.001, 0.5, 9.0])
def test_figures_before_a_picture_are_of_a_minute_few_and_near_to_it(frame_s: float) -> None:
    shown = film(1_000, frame_s)
    times = [float(str(point["at_s"])) - 7 for point in shown.points_before(900)]
    end_s = 900 * frame_s
    assert all(before < after for before, after in pairwise([*times, end_s]))
    assert times[0] == pytest.approx(max(end_s - SPAN_S, 0.0), abs=frame_s)
    assert times[-1] == pytest.approx(end_s - frame_s)
    assert 6 <= len(times) <= 2 * NUM_POINTS
    assert (
        max(after - before for before, after in pairwise(times))
        <= SPAN_S / NUM_POINTS + 1.01 * frame_s
    )


def test_the_first_picture_has_nothing_before_it() -> None:
    assert film(3, 0.1).points_before(0) == []
    assert len(film(3, 0.1).points_before(1)) == 1
