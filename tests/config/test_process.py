from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.config.process import NICENESS, Child, module_command


def test_files_of_the_current_folder_are_not_taken_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("traceback", "torch", "weft"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the folder was run')")
    monkeypatch.setattr(sys, "path", ["/nowhere", *sys.path])
    command = [*module_command("weft"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("weft ")


def test_a_checkout_that_is_run_in_place_runs_its_own_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for here in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [here, *sys.path])
        assert module_command("weft.launch.worker") == (sys.executable, "-m", "weft.launch.worker")


def test_a_process_that_helps_loads_no_settings() -> None:
    """Each server waits for such processes, and has several of them."""
    modules = "weft.text.templates.render_process", "weft.grammar.sandbox_process"
    code = f"import sys, {', '.join(modules)}\nprint('weft.config.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_process_that_helps_has_a_low_priority_from_its_start() -> None:
    child = Child("weft.text.templates.render_process")
    try:  # it has not imported its modules yet, and could not have lowered its priority itself
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(os.nice(0) + NICENESS, 19)
    finally:
        child.close()
