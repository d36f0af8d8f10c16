"""Steps with adapters by the kernels of a GPU, in their interpreter, on the fake GPU: with graphs
and without. None of this has seen a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.executor.driver import Driver, Turn
from tests.executor.lora.adapters import ENDS, QV, Base, load, logprobs_with, make_adapter
from tests.executor.triton_gpu import RepeatingGpu
from weft.executor.gpu import build
from weft.plan.step import LAST_SAMPLED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # of padding
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> RepeatingGpu:
    gpu = RepeatingGpu()
    monkeypatch.setattr(build, "find_gpu", lambda: gpu)
    return gpu


def test_graphs_hold_for_any_adapters_and_steps_without_have_their_own(
    base: Base, drive, gpu: RepeatingGpu, tmp_path: Path
) -> None:
    settings = {"num_adapter_slots": 2, "max_rank": 16}
    ours = drive(base, device="cuda", cuda_graph_sizes="4", cuda_graph_prompt=0, **settings)
    theirs = drive(base, kernels="auto", **settings)
    layer = base.modules(("mlp.gate_proj", *QV), layers=[1])
    kinds = [([*layer, *ENDS], 8), (base.modules(("mlp.down_proj",), layers=[0]), 4)]
    for place, (modules, rank) in enumerate(kinds):
        made = make_adapter(base, tmp_path / str(place), modules, rank=rank, seed=place)
        for driver in (ours, theirs):
            assert load(driver, base, place, made.folder).ok

    def story(driver: Driver) -> list[torch.Tensor]:
        prompts = (Turn(0, [5, 6, 7]), Turn(1, [8, 9]), Turn(2, [10]))
        next_ones = tuple(Turn(row, [LAST_SAMPLED]) for row in range(3))
        return [
            logprobs_with(driver, [0, 1, -1], *prompts),
            logprobs_with(driver, [0, 1, -1], *next_ones),
            logprobs_with(driver, [-1, 0, 1], *next_ones),
            driver.run(*next_ones),
        ]

    for actual, expected in zip(story(ours), story(theirs), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
    assert gpu.num_replays == 3
