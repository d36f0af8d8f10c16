"""Which tests run beside busy processes, and that these end."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from tests.busy import busy, timed_files

HANG_S = 240.0


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


@pytest.mark.parametrize("apart", [False, True])
def test_busy_processes_end_with_what_they_were_started_for(apart: bool) -> None:
    with busy(3, apart=apart) as first:
        assert first.poll() is None
        while len(loops := psutil.Process(first.pid).children()) < 2:
            time.sleep(0.001)
        assert (os.getsid(first.pid) != os.getsid(0)) == apart
    assert first.returncode is not None
    _, alive = psutil.wait_procs(loops, timeout=HANG_S)
    assert not alive
