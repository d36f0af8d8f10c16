"""Whole steps of models with layers that keep a state, by the Triton kernels in their interpreter
on the fake GPU, eager and as graphs: as torch computes them on a CPU. None of this has seen a
GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.driver import Driver, Turn, make_driver
from tests.executor.fake_gpu import FakeGpu
from tests.executor.triton_gpu import gpu as gpu  # a fixture
from tests.models.many import VOCAB, make_checkpoint
from tests.seeds import slow
from weft.config.model import ModelConfig
from weft.plan.step import LAST_SAMPLED

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
    # Of what stands in padding.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

TOKENS = np.random.default_rng(4).integers(0, VOCAB, 40).tolist()


@pytest.fixture(params=["lfm2", *slow(["qwen3.5"])])
def drivers(
    request: pytest.FixtureRequest, gpu: FakeGpu, tmp_path: Path
) -> Iterator[tuple[Driver, Driver]]:
    folder = make_checkpoint(request.param, tmp_path).folder
    model = ModelConfig.from_folder(folder)
    # The interpreter is slow, so only the model with the shortest programs has a graph for prompts.
    prompt = 8 if request.param == "lfm2" else 0
    settings = {"device": "cuda", "cuda_graph_sizes": "4", "cuda_graph_prompt": prompt}
    drivers = make_driver(model, folder, **settings), make_driver(model, folder)
    yield drivers
    for driver in drivers:
        driver.runner.close()


def test_the_kernels_compute_what_the_cpu_does(
    drivers: tuple[Driver, Driver], gpu: FakeGpu
) -> None:
    """Prompts, a copy of a state on the way, a request that goes on from it, a mixed step and
    decode steps, these as graphs that are filled up."""

    def story(each: Driver) -> list[torch.Tensor]:
        copy = each.keep(1, 3)
        first = each.run(Turn(0, TOKENS[:2], samples=False), Turn(1, TOKENS[:8]))
        each.fork(1, 2, 3, copy)
        at_end = each.keep(2, 4)
        mixed = each.run(Turn(0, TOKENS[2:4]), Turn(1, TOKENS[8:9]), Turn(2, TOKENS[3:7]))
        each.fork(2, 3, 7, at_end)
        of_decode = each.keep(1, 1)
        four = each.run(*(Turn(row, [TOKENS[30 + row]]) for row in (1, 0, 2, 3)))
        each.fork(1, 4, 10, of_decode)
        two = each.run(Turn(4, TOKENS[35:36]), Turn(0, TOKENS[36:37]))
        return [first, mixed, four, two]

    for actual, expected in zip(*map(story, drivers), strict=True):
        assert actual.shape == expected.shape == (len(expected), VOCAB)
        assert torch.allclose(actual, expected, atol=1e-4)
    assert gpu.num_replays >= 2


def test_torch_computes_them_on_a_gpu_as_well(gpu: FakeGpu, tmp_path: Path) -> None:
    folder = make_checkpoint("lfm2", tmp_path).folder
    model = ModelConfig.from_folder(folder)
    ours = make_driver(model, folder, device="cuda", attention_backend="torch")
    plain = make_driver(model, folder)
    for turn in (Turn(0, TOKENS[:9]), Turn(0, [LAST_SAMPLED])):
        assert torch.allclose(ours.run(turn), plain.run(turn), atol=1e-5)
    for driver in (ours, plain):
        driver.runner.close()
