"""Starts the files of tests that take longest first, so that the processes of a run end together.

Left to itself, pytest-xdist starts those with the most tests first, and a server's few slow tests
come last. `tests/durations.json` has the seconds of each file that takes over a second;
`--record-durations` brings it up to date.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
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


class LongestFirst:
    """Orders files; the tests of a file keep their order."""

    def __init__(self, durations: Mapping[str, float]) -> None:
        self._durations = durations

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self._durations.get(file_of(item.nodeid), 0.0))


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
