"""Starts the files of tests that take longest first, so that the processes of a run end together.

`tests/durations.json` has the seconds of each file that takes over a second;
`--record-durations` brings it up to date.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "durations.json"
SHORTEST_S = 1.0  # what takes less is left out of the record


def read_durations(path: Path = RECORD) -> dict[str, float]:
    """Seconds of each file, by its path in the repository. Those without an entry take less than
    `SHORTEST_S`, or are new."""
    seconds: dict[str, float] = json.loads(path.read_text())
    return seconds


def updated(record: Mapping[str, float], ran: Mapping[str, float], root: Path) -> dict[str, float]:
    """The record after a run: files that are gone leave it, and files that did not run keep their
    seconds."""
    seconds = {**record, **{file: round(one, 1) for file, one in ran.items()}}
    return {
        file: one
        for file, one in sorted(seconds.items())
        if one >= SHORTEST_S and (root / file).exists()
    }


def longest_first(
    items: Iterable[pytest.Item], durations: Mapping[str, float]
) -> list[list[pytest.Item]]:
    """The tests of each file, in their order; what takes longest first."""
    files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[file_of(item.nodeid)].append(item)
    names = sorted(files, key=lambda name: -durations.get(name, 0.0))
    return [files[name] for name in names]


class DurationRecorder:
    """Writes the seconds of each file that has run, with its fixtures, into the record when the run
    ends."""

    def __init__(self, path: Path = RECORD, root: Path = ROOT) -> None:
        self._path = path
        self._root = root
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        record = updated(read_durations(self._path), self._seconds, self._root)
        self._path.write_text(json.dumps(record, indent=2) + "\n")


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
