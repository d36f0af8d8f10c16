"""Attention by packages of others (`fa3`, `flashinfer`) on the fake GPU, with strict fakes of them: whole steps and a
whole engine against torch. None of this has seen a GPU, nor the real packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, make_driver
from tests.executor.fake_gpu import FakeGpu
from tests.executor.fake_providers import fake_flashinfer, flash_attn_with_kvcache, module
from tests.executor.test_cuda_path import generate
from tests.executor.test_cuda_triton import RepeatingGpu
from tests.launch.tiny_model import write_tiny_model
from weft.assemble.build import build_engine
from weft.config.engine import EngineConfig
from weft.config.gpu import PROVIDERS
from weft.config.machine import GpuCard, Machine
from weft.config.model import ModelConfig
from weft.config.resolve import GB, resolve
from weft.executor import build
from weft.executor.gpu.fa3_attention import SPLIT_TOKENS, max_splits
from weft.executor.gpu.parts import GpuParts, gpu_parts
from weft.executor.gpu.providers import MODULES, NoProvider, installed, provider
from weft.executor.kv_pool import KVPool
from weft.ops.plain import PlainOps
from weft.ops.sampling import TorchChoose
from weft.ops.triton import rotary
from weft.plan.step import LAST_SAMPLED

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the package triton is not installed"
)

TEXT = list(range(1, 21))
WINDOW = replace(
    MODEL, head_dim=64, num_heads=4, qk_norm=True, sliding_window=6, full_attention_layers=(1,)
)


def parts(
    engine: EngineConfig, config: ModelConfig, pool: KVPool, context_length: int, gpu: Any
) -> GpuParts:
    """The attention that was asked for, between functions that no interpreter computes."""
    found = gpu_parts(engine, config, pool, context_length, gpu)
    return found._replace(
        ops=PlainOps(getattr(torch, config.dtype), gpu.device), choose=TorchChoose()
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = RepeatingGpu()
    monkeypatch.setattr(build, "find_gpu", lambda engine: gpu if engine.device == "cuda" else None)
    monkeypatch.setattr(build, "gpu_parts", parts)
    monkeypatch.setattr(rotary, "FEW_TOKENS", 0)  # fewer programs to interpret
    fa3 = module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer(gpu))
    return gpu


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.runner.close()


def driver_on_gpu(backend: str) -> Driver:
    graphs = {"cuda_graph_sizes": "2,4", "cuda_graph_prompt": 24}
    return make_driver(WINDOW, device="cuda", attention_backend=backend, dtype="float16", **graphs)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
def test_a_provider_computes_what_torch_does(
    gpu: FakeGpu, drivers: list[Driver], backend: str
) -> None:
    """Prompts, chunks, a shared prefix, mixed steps, and decode steps of every size: eager, and as graphs that are
    filled up; one layer of two has a window."""
    drivers.extend((driver_on_gpu(backend), make_driver(WINDOW, dtype="float16")))

    def story(each: Driver) -> list[torch.Tensor]:
        first = each.run(Turn(0, TEXT[:9], samples=False), Turn(1, TEXT))
        mixed = each.run(Turn(0, TEXT[9:]), Turn(1, [LAST_SAMPLED]), Turn(5, [4]))
        each.share(1, 2, 16)
        shared = each.run(Turn(2, TEXT[5:9]))
        rows = ([2], [0, 2], [1, 0, 2], [0, 1], [2, 1, 0, 5])
        decodes = [each.run(*(Turn(row, [LAST_SAMPLED]) for row in some)) for some in rows]
        each.run(Turn(3, TEXT[:2]), Turn(4, TEXT[:3]))
        return [
            first,
            mixed,
            shared,
            *decodes,
            each.run(*(Turn(row, [LAST_SAMPLED]) for row in range(6))),
        ]

    for actual, expected in zip(*map(story, drivers), strict=True):
        assert torch.allclose(actual, expected, atol=5e-3)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    assert gpu.sizes == ([24, 4, 2] if backend == "fa3" else [4, 2])
    assert gpu.num_replays == (8 if backend == "fa3" else 5)


@pytest.mark.parametrize(("backend", "page_size"), [("fa3", 8), ("flashinfer", 1)])
def test_an_engine_gives_the_tokens_of_torch_with_pages_of_any_size(
    gpu: FakeGpu, tmp_path: Path, backend: str, page_size: int
) -> None:
    """With overlap: nothing that a provider copies from pinned memory is overwritten too early."""
    folder = write_tiny_model(tmp_path, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    machine = Machine(1, 8 * GB, 8 * GB, (GpuCard("fake", 8 * GB, 8 * GB, (9, 0)),))
    outputs = []
    for name in ("torch", backend):
        asked = EngineConfig(
            model=str(folder),
            load_format="dummy",
            attention_backend=name,
            dtype="float16",
            page_size=page_size,
            kv_tokens=400,
            cuda_graph_sizes="1,4" if name == backend else "",
            cuda_graph_prompt=32,
            max_running_requests=6,
            chunked_prefill_size=24,
        )
        config = resolve(asked, ModelConfig.from_folder(folder), machine).config
        outputs.append(generate(build_engine(config, folder).engine, gpu))
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].most_in_flight > 0
    assert gpu.num_replays > 10


def test_scratch_for_splits_is_bounded_and_a_single_token_has_many() -> None:
    assert [max_splits(num) for num in (1, 32, 256, SPLIT_TOKENS, 8 * SPLIT_TOKENS)] == [
        64,
        64,
        8,
        1,
        1,
    ]


def test_a_provider_that_is_not_installed_is_said_with_the_extra_that_brings_it() -> None:
    assert tuple(MODULES) == PROVIDERS
    for name, modules in (
        ("fa3", "flash_attn_interface nor sgl_kernel.flash_attn"),
        ("flashinfer", "flashinfer"),
    ):
        if not installed(name):
            with pytest.raises(
                NoProvider, match=rf"{modules} is not installed; pip install 'weft\[{name}\]'"
            ):
                provider(name)


def test_a_provider_that_cannot_be_imported_is_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(
        NoProvider, match="flashinfer is installed but cannot be imported: undefined symbol"
    ):
        provider("flashinfer")
    assert installed("flashinfer") == "flashinfer"
