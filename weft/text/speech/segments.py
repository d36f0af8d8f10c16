"""The segments of a transcript: what was said between two times.

    output     <0.00> text <2.40> <2.40> text <5.00> <5.00>
    segments   |------ 0 to 2.4 ------|------ 2.4 to 5 ----|  the next window begins at 5

Source: the long-form decoding of Radford et al., arXiv:2212.04356, section 3.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.text.speech.vocabulary import FRAMES_PER_TIME, TIME_STEP_S, SpeechTokens


class SpokenSegment(NamedTuple):
    start_s: float
    end_s: float
    ids: tuple[int, ...]  # with those of its times
    first: int  # index of the first of them in the output of the window


class CutWindow(NamedTuple):
    """The segments of the output of a window, and the frames to the beginning of the next one."""

    segments: list[SpokenSegment]
    num_frames: int


def cut(output: Sequence[int], tokens: SpeechTokens, begin_s: float, num_frames: int) -> CutWindow:
    """Cut the output of a window, without its end token. `begin_s`: where the window begins in the
    sound; `num_frames`: the frames of the sound in it."""
    first = tokens.first_timestamp
    is_time = [id >= first for id in output]
    # A segment ends where one time follows another.
    borders = [i for i in range(1, len(output)) if is_time[i - 1] and is_time[i]]
    if not borders:
        return CutWindow([_undivided(output, tokens, begin_s, num_frames)], num_frames)
    # A time after text, and nothing after it: no more is said in the window.
    is_complete = is_time[-2:] == [False, True]
    ends = [*borders, len(output)] if is_complete else borders
    segments = []
    begin = 0
    for end in ends:
        ids = tuple(output[begin:end])
        start_s = begin_s + (ids[0] - first) * TIME_STEP_S
        segments.append(
            SpokenSegment(start_s, begin_s + (ids[-1] - first) * TIME_STEP_S, ids, begin)
        )
        begin = end
    if is_complete:
        return CutWindow(segments, num_frames)
    # What follows the last border is cut off by the end of the window: the next one begins there.
    skipped = (output[borders[-1] - 1] - first) * FRAMES_PER_TIME
    return CutWindow(segments, skipped if 0 < skipped <= num_frames else num_frames)


def _undivided(
    output: Sequence[int], tokens: SpeechTokens, begin_s: float, num_frames: int
) -> SpokenSegment:
    """One segment, up to the last time in it, or to the end of the window."""
    length = num_frames // FRAMES_PER_TIME
    times = [id - tokens.first_timestamp for id in output if id >= tokens.first_timestamp]
    if times and times[-1]:
        length = times[-1]
    return SpokenSegment(begin_s, begin_s + length * TIME_STEP_S, tuple(output), 0)
