"""Whole steps with the Triton kernels in their interpreter, on the fake GPU: that runner, layout,
graphs and kernels agree on what lies where. In float32; none of this has seen a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, make_driver
from tests.executor.fake_gpu import FakeGpu
from tests.executor.gpu_driver import drawn, gpu_driver
from tests.executor.triton_gpu import gpu as gpu
from weft.plan.step import LAST_SAMPLED

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.filterwarnings(
        "ignore:.*encountered in:RuntimeWarning"
    ),  # of what stands in padding
]

TEXT = list(range(1, 21))


@pytest.fixture
def drivers(gpu: FakeGpu) -> Iterator[tuple[Driver, Driver]]:
    drivers = gpu_driver("4", cuda_graph_prompt=16), make_driver()
    yield drivers
    for driver in drivers:
        driver.runner.close()


def test_the_kernels_compute_what_the_cpu_does(
    drivers: tuple[Driver, Driver], gpu: FakeGpu
) -> None:
    """Prompts, a chunk behind cached tokens, a mixed step, and decode steps, these as graphs that
    are filled up."""

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
