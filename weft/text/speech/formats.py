"""Transcripts as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Caption(NamedTuple):
    start_s: float
    end_s: float
    text: str


def srt(captions: Sequence[Caption]) -> str:
    blocks = []
    for number, one in enumerate(captions, 1):
        times = f"{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}"
        blocks.append(f"{number}\n{times}\n{_line(one.text)}\n\n")
    return "".join(blocks)


def vtt(captions: Sequence[Caption]) -> str:
    blocks = ["WEBVTT\n\n"]
    for one in captions:
        times = f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}"
        blocks.append(f"{times}\n{_line(one.text)}\n\n")
    return "".join(blocks)


def _line(text: str) -> str:
    """The text of a caption: neither an arrow, which both formats read as times, nor an empty line,
    which ends a caption."""
    return " ".join(text.replace("-->", "->").split())


def _time(seconds: float, point: str) -> str:
    total = round(seconds * 1_000)
    minutes, milliseconds = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds_left, milliseconds = divmod(milliseconds, 1_000)
    return f"{hours:02d}:{minutes:02d}:{seconds_left:02d}{point}{milliseconds:03d}"
