"""Engine and front freeze their garbage collectors by themselves as soon as they have warmed up."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from tests.launch.server_process import ServerProcess, eventually
from tests.launch.tiny_model import write_tiny_model
from weft.assemble.build import build_engine
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_built_engine_is_out_of_the_collectors_sight(model: Path, own_freezing: None) -> None:
    prepared = prepare(
        EngineConfig(model=str(model), load_format="dummy", kv_tokens=512, threads=1)
    )
    built = build_engine(prepared.config, prepared.folder)
    try:
        assert gc.get_freeze_count() > 1_000
        seen = {id(one) for one in gc.get_objects()}
        assert id(built.engine) not in seen
        assert id(built.engine.scheduler.waiting_queue) not in seen
    finally:
        built.runner.close()


def test_the_front_freezes_when_the_engine_is_ready(model: Path) -> None:
    with ServerProcess(model, "--log-level", "debug") as server:
        server.wait_ready()
        assert eventually(
            lambda: any(re.search(r"garbage frozen objects=\d{4}", line) for line in server.lines)
        )
