"""How the output of a window is cut into segments: a number from 100 on is a time."""

from __future__ import annotations

import pytest

from weft.text.speech.segments import cut
from weft.text.speech.vocabulary import SpeechTokens

NUM_FRAMES = 200
TOKENS = SpeechTokens(
    begin=90, end=80, previous=91, no_speech=92, no_timestamps=99, tasks={}, languages={}
)


@pytest.mark.parametrize(
    ("output", "segments", "num_frames"),
    [
        # What follows the last pair of times is said again in the next window.
        (
            [100, 1, 120, 120, 2, 3, 150, 150, 4],
            [(10.0, 10.4, (100, 1, 120)), (10.4, 11.0, (120, 2, 3, 150))],
            100,
        ),
        # Nothing follows a time behind text.
        (
            [100, 1, 120, 120, 2, 150],
            [(10.0, 10.4, (100, 1, 120)), (10.4, 11.0, (120, 2, 150))],
            NUM_FRAMES,
        ),
        ([110, 110, 1, 130, 130], [(10.2, 10.2, (110,)), (10.2, 10.6, (110, 1, 130))], 60),
        ([100, 1, 120], [(10.0, 10.4, (100, 1, 120))], NUM_FRAMES),
        ([100, 1, 2], [(10.0, 12.0, (100, 1, 2))], NUM_FRAMES),
        # The next window never begins where this one did.
        ([100, 100], [(10.0, 10.0, (100,))], NUM_FRAMES),
    ],
)
def test_an_output_is_cut_where_two_times_follow_each_other(
    output: list[int], segments: list[tuple[float, float, tuple[int, ...]]], num_frames: int
) -> None:
    found = cut(output, TOKENS, 10.0, NUM_FRAMES)
    told = [(round(one.start_s, 3), round(one.end_s, 3), one.ids) for one in found.segments]
    assert (told, found.num_frames) == (segments, num_frames)
    for one in found.segments:
        assert output[one.first : one.first + len(one.ids)] == list(one.ids)
