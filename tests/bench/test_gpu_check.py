"""That the script which will judge the GPU works at all: on a CPU, with tiny shapes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.seeds import slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parts", ["bench-0.6b", *slow(["attention,bench-0.6b"])])
def test_parts_run_on_a_cpu_and_their_findings_are_kept(tmp_path: Path, parts: str) -> None:
    command = [
        sys.executable,
        SCRIPT,
        "--device",
        "cpu",
        "--small",
        "--parts",
        parts,
        "--out",
        tmp_path,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(found) == parts.split(",")
    assert all(part["rows"] and not part["end"] for part in found.values())
    crowd = next(row for row in found["bench-0.6b"]["rows"] if row["what"] == "8 requests, greedy")
    assert crowd["ok"]
    assert crowd["out_per_s"] > 0


def test_a_part_that_breaks_is_reported_and_takes_nothing_with_it(
    script: ModuleType, tmp_path: Path
) -> None:
    options = argparse.Namespace(device="cpu", small=True)
    broken = script.run("nothing", options, tmp_path, 60)
    assert "ModuleNotFoundError" in broken["end"]
    assert not script.is_good(broken)
    assert script.run("probe", options, tmp_path, 3)["end"] == "no time was left"


def test_what_is_not_equal_stands_out(script: ModuleType) -> None:
    found = {
        "end": "",
        "seconds": 1.0,
        "rows": [{"what": "a", "ok": True, "error": 0.5}, {"what": "b", "ok": False}],
    }
    assert not script.is_good(found)
    assert [line[:2] for line in script.lines("part", found)] == ["==", "  ", "!!"]
    assert found["rows"][0]["what"] == "a", "what is printed is still there to be written down"
