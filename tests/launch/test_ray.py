"""weft in Ray Serve: it answers, and an engine that is killed is replaced. Needs ray[serve]."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve", reason="needs ray[serve]")

import ray
from ray import serve

from weft.config.options import SettingsError
from weft.launch.ray import build

MODEL = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
URL = "http://127.0.0.1:31311"
ARGS = {"model": str(MODEL), "threads": "1", "kv_tokens": "20000", "num_cpus": "1"}


@pytest.fixture(scope="module")
def deployed() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 31311})
    serve.run(build(ARGS), name="weft", route_prefix="/")
    yield
    serve.shutdown()
    ray.shutdown()


def ask() -> int:
    body = {"prompt": "import os", "max_tokens": 4}
    return httpx.post(f"{URL}/v1/completions", json=body, timeout=120).status_code


def engines() -> list[psutil.Process]:
    """The engine processes below Ray's."""
    return [one for one in psutil.process_iter(["cmdline"]) if is_engine(one)]


def is_engine(process: psutil.Process) -> bool:
    command = process.info["cmdline"] or []
    if "weft.launch.start_worker" not in command:
        return False
    return any("Replica" in " ".join(parent.cmdline()) for parent in process.parents())


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="no-such"):
        build({"no_such": "1"})


def test_it_answers_and_replaces_a_killed_engine(deployed: None) -> None:
    assert ask() == 200
    (engine,) = engines()
    engine.kill()
    deadline = time.monotonic() + 240
    while not engines() or ask() != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
