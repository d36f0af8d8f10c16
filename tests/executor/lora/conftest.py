from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.executor.driver import Driver
from tests.executor.lora.adapters import Base, make_base, make_lora_driver


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """The model of a family, made once."""
    made: dict[str, Base] = {}

    def make(family: str) -> Base:
        if family not in made:
            made[family] = make_base(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture
def base(base_of: Callable[[str], Base]) -> Base:
    return base_of("llama")


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """`make_lora_driver`, closed at the end."""
    drivers: list[Driver] = []

    def start(base: Base, **settings: Any) -> Driver:
        drivers.append(make_lora_driver(base, **settings))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.runner.close()
