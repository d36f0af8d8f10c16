"""`--workers N`: the tests of a run in several processes, as if they were in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.workers import Queue

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240.0
CONFTEST = """
import os
import pytest

@pytest.fixture(scope="module")
def of_a_module(request):
    yield
    with open("ended", "a") as file:
        file.write(request.node.name + "\\n")
"""
# Of each outcome one. What is written while they are collected tells in which process that is.
OUTCOMES = """
import os
import sys
import warnings
import pytest
from tests import forked

sys.executable = "/bin/true"  # instead of the process that forks servers

with open("collected", "a") as file:
    file.write(f"{os.getpid()}\\n")

def test_passes(of_a_module, tmp_path):
    print("what nobody sees")
    with open("ran", "a") as file:
        file.write(f"{os.getpid()}\\n")
    with open("forks", "a") as file:
        file.write(f"{forked._first_process()[1].pid}\\n")

def test_fails(of_a_module):
    print("what is shown")
    assert 1 == 2

def test_is_skipped():
    pytest.skip("for a reason")

def test_warns():
    warnings.warn("something odd", DeprecationWarning)
"""
ENDS = """
import os

def test_before():
    pass

def test_ends(of_a_module):
    os._exit(7)

def test_behind(of_a_module):
    pass
"""
WAITS = """
import time

def test_waits(of_a_module):
    open("waits", "w").close()
    time.sleep(240)
"""
FAILS = """
import os
import time

def test_fails():
    while not os.path.exists("waits"):
        time.sleep(0.01)
    assert False
"""


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    timeout: x\n    slow: x\n")
    for name, source in files.items():
        (folder / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.running"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--workers", "2", *options, *files],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "INTERNALERROR" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def test_what_all_processes_report_is_told_once_and_each_file_is_imported_once(
    tmp_path: Path,
) -> None:
    status, text = run(tmp_path, {"test_a.py": OUTCOMES, "test_b.py": OUTCOMES})
    assert status == 1
    assert "2 failed, 4 passed, 2 skipped, 2 warnings" in text, text
    assert text.count("\nwhat is shown\n") == 2
    assert text.count("DeprecationWarning: something odd") >= 1
    assert "what nobody sees" not in text
    collected = (tmp_path / "collected").read_text().split()
    ran = (tmp_path / "ran").read_text().split()
    assert len(collected) == len(ran) == 2
    assert len(set(collected)) == 1
    assert not set(collected) & set(ran)
    forks = (tmp_path / "forks").read_text().split()
    assert len(forks) == 2
    assert len(set(forks)) == 1
    assert sorted((tmp_path / "ended").read_text().split()) == ["test_a.py", "test_b.py"]


def test_a_test_in_which_a_process_ends_fails_and_those_behind_it_are_run(tmp_path: Path) -> None:
    status, text = run(tmp_path, {"test_a.py": ENDS, "test_b.py": OUTCOMES})
    assert status == 1
    assert "2 failed, 4 passed, 1 skipped" in text, text
    assert "the process that ran this test has ended with status 7" in text
    assert "FAILED test_a.py::test_ends" in text


def test_a_run_that_stops_at_the_first_failure_ends_what_others_have_begun(tmp_path: Path) -> None:
    status, text = run(tmp_path, {"test_a.py": WAITS, "test_b.py": FAILS}, "-x")
    assert status == 1
    assert "1 failed in" in text, text
    assert (tmp_path / "ended").read_text() == "test_a.py\n"


def test_each_number_is_taken_once_by_whoever_comes() -> None:
    queue = Queue(300)
    first = iter(queue)
    second = iter(queue)
    taken = [next(first), next(second), *first, *second]
    queue.close()
    assert sorted(taken) == list(range(300))
