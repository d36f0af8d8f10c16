from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor.driver import Driver, make_driver
from tests.models.reference import FAMILIES, VOCAB, Reference, make_reference
from weft.config.model import ModelConfig


@pytest.fixture(scope="session", params=list(FAMILIES))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Every family; the weights of one are in several files."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_reference(request.param, folder, "30KB" if request.param == "qwen3" else "1GB")


@pytest.fixture(params=["torch", "auto"])
def drive(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Load a model, computed by torch or by the best CPU kernels here: `drive(folder, **settings of
    the engine)`."""
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        settings = {"kernels": request.param, **settings}
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


@pytest.fixture
def prompt() -> Callable[[int, int], list[int]]:
    """Random tokens: `prompt(seed, length)`."""
    return lambda seed, length: np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
