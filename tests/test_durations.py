"""Which files of tests start first, and what `--record-durations` writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.durations import (
    ROOT,
    SHORTEST_S,
    DurationRecorder,
    longest_first,
    read_durations,
    updated,
)


def items_of(*nodeids: str) -> list[pytest.Item]:
    return cast("list[pytest.Item]", [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids])


def report(nodeid: str, seconds: float) -> pytest.TestReport:
    return cast(pytest.TestReport, SimpleNamespace(nodeid=nodeid, duration=seconds))


def test_the_file_that_takes_longest_starts_first_and_its_tests_keep_their_order() -> None:
    items = items_of("a.py::two", "b.py::second", "c.py::one", "b.py::first", "a.py::one")
    files = longest_first(items, {"b.py": 9.0, "c.py": 2.0})
    assert [[item.nodeid for item in file] for file in files] == [
        ["b.py::second", "b.py::first"],
        ["c.py::one"],
        ["a.py::two", "a.py::one"],
    ]


def test_a_run_of_some_files_changes_their_seconds_alone(tmp_path: Path) -> None:
    for name in ("ran.py", "other.py", "short.py"):
        (tmp_path / name).touch()
    record = {"ran.py": 5.0, "other.py": 7.0, "short.py": 3.0, "gone.py": 9.0}
    ran = {"ran.py": 6.04, "short.py": SHORTEST_S / 2}
    assert updated(record, ran, tmp_path) == {"other.py": 7.0, "ran.py": 6.0}


def test_the_record_counts_fixtures_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").touch()
    path = tmp_path / "durations.json"
    path.write_text("{}")
    recorder = DurationRecorder(path, tmp_path)
    for seconds in (3.0, 0.25, 1.5):  # setup, call, teardown
        recorder.pytest_runtest_logreport(report("test_a.py::one[a::b]", seconds))
    recorder.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"test_a.py": 4.8}


def test_the_record_names_files_that_exist() -> None:
    missing = [file for file in read_durations() if not (ROOT / file).is_file()]
    assert not missing, f"--record-durations takes them out: {missing}"
