"""Whole steps with the Triton kernels in their interpreter, on the fake GPU: that runner, layout, graphs and kernels
agree on what lies where. In float32; none of this has seen a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, make_driver
from tests.executor.fake_gpu import FakeGpu
from tests.executor.test_cuda_path import drawn, gpu_driver
from weft.executor.gpu import build
from weft.plan.step import LAST_SAMPLED

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.filterwarnings(
        "ignore:.*encountered in:RuntimeWarning"
    ),  # of what stands in padding
]

TEXT = list(range(1, 21))


class Again:
    """A graph that does the work again: an interpreter launches no kernels that could be recorded."""

    def __init__(self, gpu: FakeGpu, work: Callable[[], Any], result: Any) -> None:
        self._gpu, self._work, self._result = gpu, work, result

    def replay(self) -> None:
        self._gpu.num_replays += 1
        for old, new in zip(self._result, self._work(), strict=True):
            old.copy_(new)


class RepeatingGpu(FakeGpu):
    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        result = work()
        self.sizes.append(len(result[-1]))
        return Again(self, work, result), result


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = RepeatingGpu()
    monkeypatch.setattr(build, "find_gpu", lambda: gpu)
    return gpu


@pytest.fixture
def drivers(gpu: FakeGpu) -> Iterator[tuple[Driver, Driver]]:
    drivers = gpu_driver("4", cuda_graph_prompt=16), make_driver()
    yield drivers
    for driver in drivers:
        driver.runner.close()


def test_the_kernels_compute_what_the_cpu_does(
    drivers: tuple[Driver, Driver], gpu: FakeGpu
) -> None:
    """Prompts, a chunk behind cached tokens, a mixed step, and decode steps, these as graphs that are filled up."""

    def story(each: Driver) -> list[torch.Tensor]:
        first = each.run(Turn(0, TEXT[:9], samples=False), Turn(1, TEXT))
        mixed = each.run(Turn(0, TEXT[9:17]), Turn(1, [LAST_SAMPLED]), Turn(2, [7]))
        rows = ([0, 2], [1, 0, 2])
        return [
            first,
            mixed,
            *(each.run(*(Turn(row, [LAST_SAMPLED]) for row in some)) for some in rows),
        ]

    for actual, expected in zip(*map(story, drivers), strict=True):
        assert actual.shape == expected.shape == (len(expected), MODEL.vocab_size)
        assert torch.allclose(actual, expected, atol=1e-4)
    assert gpu.num_replays == 3


def test_draws_are_those_of_the_cpu(drivers: tuple[Driver, Driver]) -> None:
    for turns in (
        [Turn(0, TEXT[:5]), Turn(1, TEXT[:3])],
        [Turn(1, [LAST_SAMPLED]), Turn(0, [LAST_SAMPLED])],
    ):
        actual, expected = (drawn(driver, *turns) for driver in drivers)
        assert actual == expected
