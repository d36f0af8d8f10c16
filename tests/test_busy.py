"""Which tests run beside busy processes, and that these end."""

from __future__ import annotations

from tests.busy import busy, timed_files


def test_files_that_wait_are_found_through_helpers_and_fixtures() -> None:
    imports = {
        "tests/a/test_plain.py": {"json", "tests.a.plain"},
        "tests/a/plain.py": {"math"},
        "tests/a/test_waits.py": {"time", "time.sleep"},
        "tests/a/test_helped.py": {"tests.a.server", "tests.a.server.start"},
        "tests/a/server.py": {"tests.a.process"},
        "tests/a/process.py": {"subprocess"},
        "tests/b/conftest.py": {"threading"},
        "tests/b/test_fixture.py": {"json"},
        "tests/conftest.py": {"time"},
    }
    assert timed_files(imports) == [
        "tests/a/test_helped.py",
        "tests/a/test_waits.py",
        "tests/b/test_fixture.py",
    ]


def test_busy_processes_end_with_what_they_were_started_for() -> None:
    with busy(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert None not in [loop.returncode for loop in loops]
