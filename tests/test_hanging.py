"""A test that hangs fails alone, and whatever becomes of a run, nothing that it started outlives
it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.server_process import eventually, is_alive

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240.0
CONFTEST = """
import os
import time

from tests import hanging

hanging.GRACE_S = float(os.environ.get("GRACE_S", "0.3"))
hanging.RENEWED_S = 0.0
hanging.LAST_END_S = 0.3
hanging.BUSY_LOAD = 1e9
os.getloadavg = lambda: (float(os.environ.get("FAKE_LOAD", "0")), 0.0, 0.0)

def pytest_runtest_logreport(report):
    if os.environ.get("SLOW_REPORTS"):
        time.sleep(0.5)
"""
HANGING = """
import signal
import time

import pytest

short = pytest.mark.timeout(0.3)

@pytest.fixture
def slow_setup():
    time.sleep(240)

@pytest.fixture
def slow_teardown():
    yield
    time.sleep(240)

@short
def test_hangs_before(slow_setup):
    pass

@short
def test_hangs():
    time.sleep(240)

@short
def test_hangs_after(slow_teardown):
    pass

def test_is_quick():
    pass
"""
STARTING = """
import subprocess
import sys
import time

def start():
    command = [sys.executable, "-c", "import time; time.sleep(240)", "weft"]
    return subprocess.Popen(command, start_new_session=True).pid

def test_starts():
    with open("pid", "w") as file:
        file.write(str(start()))
"""
PATIENT = """
import time

import pytest

pytestmark = pytest.mark.timeout(0.3)

def test_is_slow():
    time.sleep(0.6)

def test_hangs():
    time.sleep(240)
"""
WAITING = STARTING + "    time.sleep(240)\n"
HERE_AND_THERE = [("--workers", "0"), ("--workers", "1")]
DEAF = """
import signal
import time

import pytest

@pytest.mark.timeout(0.3)
def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(240)

def test_is_quick():
    pass
"""


def begin(tmp_path: Path, source: str, *options: str, **environ: str) -> subprocess.Popen[str]:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    timeout: x\n    slow: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.running"]
    # Without the other plugins that are installed, which take longer to load than these tests to
    # run.
    environ = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), **environ}
    return subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(tmp_path: Path, source: str, *options: str, **environ: str) -> tuple[int, str]:
    process = begin(tmp_path, source, *options, **environ)
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert "INTERNALERROR" not in text, text
    return process.returncode, text


@pytest.mark.parametrize("options", HERE_AND_THERE)
def test_each_phase_that_hangs_fails_alone_and_what_is_left_running_ends(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, text = run(tmp_path, HANGING + STARTING, *options, SLOW_REPORTS="1")
    assert status == 1
    assert "1 failed, 3 passed, 2 errors" in text, text
    assert "left a process running" in text, text
    assert eventually(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    for line in ("ERROR test_it.py::test_hangs_before", "FAILED test_it.py::test_hangs"):
        assert f"{line} - tests.hanging.Hung" in text, text


def test_a_busy_machine_has_more_time_but_not_for_ever(tmp_path: Path) -> None:
    status, text = run(tmp_path, PATIENT, "--workers", "0", FAKE_LOAD="1e12", GRACE_S="60")
    assert status == 1, text
    assert "1 failed, 1 passed" in text, text
    assert "taken longer than 2 s" in text, text  # 0.3 s and four more


@pytest.mark.parametrize("options", HERE_AND_THERE)
def test_a_test_that_hears_no_signal_is_ended_with_its_stacks_written(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, text = run(tmp_path, DEAF, *options)
    assert status == 1
    assert "test_hears_no_signal" in text
    assert "Timeout" in text


def test_a_server_that_a_test_leaves_running_fails_the_run(tmp_path: Path) -> None:
    status, text = run(tmp_path, STARTING, "--workers", "0")
    assert status == 1
    assert "left a process running" in text, text


@pytest.mark.parametrize("options", HERE_AND_THERE)
def test_what_a_killed_run_has_started_ends(tmp_path: Path, options: tuple[str, ...]) -> None:
    process = begin(tmp_path, WAITING, *options)
    pid = tmp_path / "pid"
    assert eventually(lambda: pid.exists() and pid.read_text() != "")
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert eventually(lambda: not is_alive(int(pid.read_text())))
    assert -process.returncode == signal.SIGKILL
