"""A released coding agent does its task, if it is there: `scripts/agents --install codex` fetches
it.

With `--all` it is fetched here, if that takes no longer than a minute.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_S = 60.0
RUN_S = 180.0
ALONE = ("unshare", "-rn")  # without a network but loopback
HERE = ROOT / os.environ.get("AGENTS_FOLDER", ".agents")


def run_driver(*words: str, time_s: float, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """The status and the output of `tests.agents`; -1 if it has not ended in time."""
    command = [*before, sys.executable, "-m", "tests.agents", *words]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=time_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -1, ""
    return process.returncode, output


def do_task(folder: Path) -> None:
    status, output = run_driver("--clients", str(folder), "codex", time_s=RUN_S, before=ALONE)
    assert status == 0, output
    assert "1 passed, 0 failed" in output


@pytest.fixture
def alone() -> None:
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("this system does not let a user make a network of its own")


@pytest.mark.timeout(2 * RUN_S)
def test_codex_reads_edits_runs_and_ends(alone: None) -> None:
    if not (HERE / "node_modules" / ".bin" / "codex").exists():
        pytest.skip("codex is not there: scripts/agents --install codex fetches it")
    do_task(HERE)


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_codex_does_its_task_when_it_was_just_fetched(alone: None, tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("npm is not there")
    words = ("--clients", str(tmp_path), "--install", "codex")
    status, output = run_driver(*words, time_s=INSTALL_S)
    if status:
        pytest.skip(f"npm gave no codex within {INSTALL_S:.0f} s: {output.strip()[-200:]}")
    do_task(tmp_path)
