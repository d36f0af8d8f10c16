"""weft in Ray Serve: it answers, and an engine that is killed is replaced. Needs ray[serve];
`ray_proof.py` has what takes minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="needs ray[serve]")

import ray
from ray import serve
from ray.serve import Application

from tests.launch.ray_engines import engines
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


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"no_such": "1"}, "no-such"),
        ({"num_replicas": "two"}, "num_replicas is 'two'; it is a number"),
        ({"num_cpus": "-1"}, "num_cpus is -1; it is 0 or more"),
        ({"session_affinity": "1"}, "it is true or false"),
        ({"min_replicas": "1"}, "min_replicas is 1, which needs max_replicas"),
        ({"max_replicas": "2", "num_replicas": "1"}, "with max_replicas Ray chooses the number"),
        ({"max_replicas": "1", "min_replicas": "2"}, "min_replicas is 2, more than max_replicas"),
        ({"nnodes": "2", "tp_size": "3"}, "nnodes is 2, which does not divide tp_size"),
        ({"nnodes": "2", "tp_size": "2", "node_rank": "1"}, "node_rank is given"),
        ({"nnodes": "2", "tp_size": "2", "dist_secret": "hush"}, "dist_secret is given"),
    ],
)
def test_impossible_values_are_refused_by_name(args: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        build(args)


def test_the_number_of_replicas_is_set_or_left_to_ray() -> None:
    assert deployment_of(build({"num_replicas": "3"})).num_replicas == 3
    scaling = deployment_of(build({"max_replicas": "4"})).autoscaling_config
    assert scaling.min_replicas == 1
    assert scaling.max_replicas == 4


def test_each_node_of_a_replica_has_a_machine_and_the_cores_of_its_ranks() -> None:
    options = replica_of(build({"tp_size": "4", "nnodes": "2", "threads": "3"}))
    assert options.placement_group_bundles == [{"CPU": 6.0}, {"CPU": 6.0}]
    assert options.placement_group_strategy == "STRICT_SPREAD"


def test_it_answers_and_replaces_a_killed_engine(deployed: None) -> None:
    assert ask() == 200
    (engine,) = engines()
    engine.kill()
    deadline = time.monotonic() + 240
    while not engines() or ask() != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def deployment_of(app: Application) -> Any:
    return app._bound_deployment._deployment_config


def replica_of(app: Application) -> Any:
    return app._bound_deployment._replica_config
