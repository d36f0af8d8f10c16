"""What a user is warned of before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.machine import probe


def test_more_threads_than_cores_are_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    machine = replace(probe(), cores=2, gpus=())
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", threads=2)
    prepare(config, machine)
    assert "--threads" not in caplog.text
    prepare(replace(config, threads=99), machine)
    assert "--threads 99 makes 99 threads on 2 cores" in caplog.text


def test_a_start_that_waits_for_a_compiler_says_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path)
    monkeypatch.setattr("weft.assemble.prepare.find", lambda _: None)
    monkeypatch.setattr("weft.assemble.prepare.find_compiler", lambda: ("c++",))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu")
    prepare(replace(config, kernels="torch"))
    assert "are compiled" not in caplog.text
    prepare(config)
    assert "the CPU kernels are compiled for this machine" in caplog.text
