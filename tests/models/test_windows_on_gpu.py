"""Layers with windows in a pool of their own, by the Triton kernels in their interpreter on the
fake GPU: prompts eager, decode steps as graphs. None of this has seen a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor.fake_gpu import FakeGpu
from tests.executor.triton_gpu import RepeatingGpu
from tests.models import windowed
from tests.models.many import VOCAB
from tests.models.windowed import WINDOW, Served, assert_greedy, make_windowed
from weft.config.amounts import GB
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard, Machine
from weft.config.model import ModelConfig
from weft.config.resolve import Resolved, resolve
from weft.executor.gpu import build

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
    # Of what stands in padding.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

MACHINE = Machine(1, 8 * GB, 8 * GB, (GpuCard("fake", 8 * GB, 8 * GB),))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = RepeatingGpu()
    monkeypatch.setattr(build, "find_gpu", lambda: gpu)
    monkeypatch.setattr(windowed, "probe", lambda: MACHINE)
    return gpu


def test_tokens_are_those_of_transformers(gpu: FakeGpu, tmp_path: Path) -> None:
    """Requests of several windows, with fewer slots for windows than they have tokens: slots of
    tokens that no later one sees are used again, also by the other request."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = make_windowed("gemma2", tmp_path, num_hidden_layers=3, layer_types=layers, **heads)
    served = Served(
        checkpoint.folder,
        device="cuda",
        cuda_graph_sizes="2",
        cuda_graph_prompt=0,
        page_size=1,
        chunked_prefill_size=24,
        kv_tokens=192,
        context_length=128,
        swa_full_tokens_ratio=0.5,
        max_running_requests=2,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (3 * WINDOW, WINDOW // 2)]
    for id, one in zip(served.run(*prompts, max_new=4), prompts, strict=True):
        assert_greedy(checkpoint, one, served.outputs[id])
    assert gpu.num_replays > 0
    # Behind what is cached.
    again = [*prompts[0], *served.outputs[0]]
    (id,) = served.run(again, max_new=2)
    assert served.cached[id] > WINDOW
    assert_greedy(checkpoint, again, served.outputs[id])
    served.runner.close()


def resolved(folder: Path, **settings: Any) -> Resolved:
    model = ModelConfig.from_folder(folder)
    given = EngineConfig(model=str(folder), device="cuda", chunked_prefill_size=32, **settings)
    return resolve(given, model, MACHINE)


def test_what_does_not_work_with_two_pools_on_a_gpu_has_one(tmp_path: Path) -> None:
    folder = make_windowed("gemma2", tmp_path).folder
    assert resolved(folder, kv_tokens=4_096).config.swa_full_tokens_ratio > 0
    for settings in ({"speculative": "ngram"}, {"cache_host_gb": 0.1}):
        assert resolved(folder, kv_tokens=4_096, **settings).config.swa_full_tokens_ratio == 0
