from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.executor.driver import KV_TOKENS, MODEL, Turn, make_driver
from tests.executor.fake_gpu import FakeGpu, fake_kernels
from weft.config.engine import EngineConfig
from weft.config.model import ModelNotFound
from weft.executor.build import load_runner
from weft.executor.cpu import build as cpu_build
from weft.executor.cpu.build import KernelsUnavailable
from weft.executor.gpu import build
from weft.executor.gpu.build import NoGpu
from weft.ops.cpp.library import Unavailable
from weft.weights.load import save_random

ROOM = {"kv_tokens": 64, "page_size": 16, "max_rows": 4, "context_length": 32}


def test_the_pool_has_just_the_slots_asked_for_in_the_dtype_of_the_engine():
    driver = make_driver(replace(MODEL, dtype="float32"), dtype="bfloat16")
    pool = driver.steps._attention._pool
    assert len(pool.k[0]) == KV_TOKENS
    assert len(pool.k) == MODEL.num_layers
    assert pool.v[1].dtype == torch.bfloat16
    assert driver.steps._model.embedding.matrix.weight.dtype == torch.bfloat16
    driver.runner.close()


def test_a_model_that_cannot_be_loaded_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(ModelNotFound, match="no weights"):
        load_runner(EngineConfig(), MODEL, folder=tmp_path, **ROOM)
    assert set(threading.enumerate()) <= before


def test_the_pool_consists_of_whole_pages():
    with pytest.raises(AssertionError):
        load_runner(EngineConfig(), MODEL, folder=Path(), **{**ROOM, "kv_tokens": 60})


def test_kernels_leave_the_callers_thread_as_they_find_it():
    """They take tiny numbers for 0 while they run, and have threads of their own."""
    threads = torch.get_num_threads()
    driver = make_driver(kernels="auto", threads=1)
    driver.run(Turn(0, [1, 2, 3]))
    driver.runner.close()
    tiny = 5e-324
    assert tiny * 1.0 > 0
    assert torch.get_num_threads() == threads


def test_kv_in_int8_needs_the_kernels():
    with pytest.raises(
        KernelsUnavailable, match="--kv-dtype is int8, which only our CPU kernels read"
    ):
        make_driver(kernels="torch", kv_dtype="int8")


def test_kernels_that_the_processor_lacks_are_refused_by_name(monkeypatch):
    def load(instruction_set):
        raise Unavailable("this processor has no avx2")

    monkeypatch.setattr(cpu_build, "load", load)
    with pytest.raises(
        KernelsUnavailable, match="--kernels is avx2, but this processor has no avx2"
    ):
        make_driver(kernels="avx2")
    driver = make_driver(kernels="auto")  # takes what there is
    assert driver.run(Turn(0, [1])).isfinite().all()
    driver.runner.close()


def test_kv_in_fp8_is_kept_in_units_of_the_checkpoints_scales(tmp_path, monkeypatch):
    save_random(MODEL, tmp_path / "weights.safetensors")
    save_file(
        {"model.layers.1.self_attn.k_scale": torch.tensor([0.5])}, tmp_path / "scales.safetensors"
    )
    found = []

    def kernels(engine, config, pool, *rest):
        found.append(pool.layer_scales)
        return fake_kernels(engine, config, pool, *rest)

    monkeypatch.setattr(build, "find_gpu", lambda: FakeGpu())
    monkeypatch.setattr(build, "gpu_kernels", kernels)
    for kv_dtype in ("fp8", "auto"):
        engine = EngineConfig(device="cuda", kv_dtype=kv_dtype, cuda_graph=False)
        load_runner(engine, MODEL, folder=tmp_path, **ROOM).close()
    assert found == [[(1.0, 1.0), (0.5, 1.0)], [(1.0, 1.0)] * 2]


def test_a_gpu_that_torch_cannot_use_is_one_line(monkeypatch):
    def broken():
        raise RuntimeError("CUDA driver initialization failed\nwith a stack of many lines")

    monkeypatch.setattr("weft.executor.gpu.cuda.Cuda", broken)
    with pytest.raises(
        NoGpu, match=r"shows \(CUDA driver initialization failed\); --device cpu can do without"
    ):
        load_runner(EngineConfig(device="cuda"), MODEL, folder=Path(), **ROOM)
