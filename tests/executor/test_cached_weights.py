"""Weights from the weights cache are those of a plain load, bit by bit: of every family, of every
format, however they are kept."""

from __future__ import annotations

import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.caches import set_own_cache
from tests.executor.cached import assert_mapped_as_loaded, runner_of, values_of
from tests.executor.gguf_files import random_blocks, write_gguf
from tests.executor.gguf_models import (
    EXPERT_VARIANTS,
    described,
    hf_weights,
    metadata,
    stored,
)
from tests.models.many import FAMILIES, SEEING, make_checkpoint, make_seeing
from tests.models.packed import FORMATS, PackedCheckpoint
from tests.models.pooled import CASES, make_pooled
from tests.seeds import every_second, one_in
from weft.ops.cpp.library import Unavailable, load
from weft.plan.device import ReleaseMemory, ResumeMemory, UpdateFromTensors
from weft.weights.cache import key
from weft.weights.cache.folder import cache_at
from weft.weights.gguf.blocks import BLOCKS

DTYPES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There are kernels; the files of models count as old."""
    try:
        load("")
    except Unavailable as exc:
        pytest.skip(str(exc))
    monkeypatch.setattr(key, "SETTLED_S", -1.0)
    set_own_cache(tmp_path / "described", monkeypatch)


def kept_as(name: str) -> str:
    """One way to keep the weights of each family; all ways occur."""
    return ("none", "int8", "int4")[len(name) % 3]


@pytest.mark.parametrize("family", one_in(8, FAMILIES))
def test_every_family(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path / "model")
    quantize = kept_as(family)
    assert_mapped_as_loaded(tmp_path / "model", tmp_path / "cache", quantize=quantize)


@pytest.mark.parametrize("name", every_second(SEEING))
@pytest.mark.parametrize("quantize_encoder", ["none", "int12"])
def test_models_with_an_encoder_of_pictures(
    tmp_path: Path, name: str, quantize_encoder: str
) -> None:
    make_seeing(name, tmp_path / "model")
    settings = {"quantize_encoder": quantize_encoder}
    assert_mapped_as_loaded(tmp_path / "model", tmp_path / "cache", **settings)


# torch computes DeBERTa: weights are kept by our kernels alone.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", one_in(8, (name for name in CASES if not name.startswith("deberta")))
)
def test_models_that_make_vectors_or_scores(tmp_path: Path, name: str, dtype: str) -> None:
    make_pooled(name, tmp_path / "model")
    assert_mapped_as_loaded(tmp_path / "model", tmp_path / "cache", dtype=dtype)


@pytest.mark.parametrize("name", every_second(FORMATS))
def test_every_packed_format(tmp_path: Path, name: str) -> None:
    packed = PackedCheckpoint(FORMATS[name], tmp_path / "model")
    assert_mapped_as_loaded(packed.folder, tmp_path / "cache", quantize="stored")


@pytest.mark.parametrize("kind", every_second(BLOCKS))
def test_every_block_format_of_gguf(tmp_path: Path, kind: str) -> None:
    size = BLOCKS[kind].size
    shapes: dict[str, Any] = {"embedding_length": size, "rope__dimension_count": size // 4}
    tensors = stored(hf_weights(hidden_size=size, head_dim=size // 4))
    for name in ("token_embd", "output", "blk.0.attn_output", "blk.1.ffn_gate", "blk.1.ffn_up"):
        shape = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = random_blocks(kind, (shape[0], shape[1]), seed=len(name))
    for name in ("attn_q", "attn_k", "attn_v"):
        shape = tensors[f"blk.0.{name}.weight"].shape
        type_of_v = "Q8_0" if name == "attn_v" else kind
        tensors[f"blk.0.{name}.weight"] = random_blocks(type_of_v, (shape[0], shape[1]))
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(**shapes), tensors))
    assert_mapped_as_loaded(folder, tmp_path / "cache", quantize="stored")


def test_codes_of_experts(tmp_path: Path) -> None:
    config, keys = EXPERT_VARIANTS["qwen3moe"]
    tensors = stored(hf_weights("qwen3moe", **config), "qwen3moe")
    for name in [name for name in tensors if "_exps." in name]:
        if tensors[name].shape[-1] % BLOCKS["Q8_0"].size == 0:
            tensors[name] = random_blocks("Q8_0", tensors[name].shape, seed=len(name))
    folder = described(write_gguf(tmp_path / "a.gguf", metadata("qwen3moe", **keys), tensors))
    assert_mapped_as_loaded(folder, tmp_path / "cache", quantize="stored")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint("qwen2", tmp_path / "model")
    return tmp_path / "model"


def names_in(cache: Path) -> set[str]:
    return {file.name for file in cache_at(str(cache), 1.0).files()}


def test_what_does_not_change_weights_finds_the_same_file(model: Path, tmp_path: Path) -> None:
    for settings in ({}, {"threads": 2}, {"kv_dtype": "int8"}, {"seed": 5}):
        runner_of(model, str(tmp_path / "cache"), dtype="float32", **settings).close()
    assert len(names_in(tmp_path / "cache")) == 1


def test_each_way_to_keep_weights_has_a_file_of_its_own(model: Path, tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"kernels": "portable"},
    ]
    for number, settings in enumerate(ways):
        runner_of(model, str(tmp_path / "cache"), **settings).close()
        assert len(names_in(tmp_path / "cache")) == number + 1


def test_a_changed_model_is_loaded_anew(model: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    runner_of(model, cache, dtype="float32").close()
    [file] = model.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] += 1.0
    times = file.stat()
    save_file(tensors, file, {"format": "pt"})
    assert file.stat().st_size == times.st_size
    # Whoever restores a file may restore its times, too, but for the time of its change.
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    runner = runner_of(model, cache, dtype="float32")
    assert torch.equal(values_of(runner)[name], tensors[name])
    runner.close()
    assert len(names_in(tmp_path / "cache")) == 2


def test_another_description_of_the_same_tensors_is_another_model(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    runner_of(model, str(cache)).close()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    runner_of(model, str(cache)).close()
    assert len(names_in(cache)) == 2


def test_files_that_were_written_just_now_are_not_trusted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "SETTLED_S", 1e9)
    runner_of(model, str(tmp_path / "cache")).close()
    assert not names_in(tmp_path / "cache")


def test_small_models_and_random_ones_have_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    runner_of(model, weights_cache="auto").close()
    runner_of(model, weights_cache="off").close()
    runner_of(model, str(tmp_path / "cache"), load_format="dummy").close()
    assert not names_in(tmp_path / "cache")
    assert not names_in(tmp_path / "weft" / "weights")


def test_a_folder_that_cannot_be_made_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    runner = runner_of(model, str(tmp_path / "cache" / "below"))
    assert values_of(runner)
    runner.close()


def test_two_that_start_at_once_pack_once(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        starts = [threads.submit(runner_of, model, str(tmp_path / "cache")) for _ in range(3)]
        runners = [start.result() for start in starts]
    first, *others = [values_of(runner) for runner in runners]
    for values in others:
        for name in first:
            assert torch.equal(values[name], first[name])
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".weights"]
    for runner in runners:
        runner.close()


def test_new_weights_stay_in_the_process_that_got_them(model: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    mine = runner_of(model, cache, dtype="float32")
    theirs = runner_of(model, cache, dtype="float32")
    before = values_of(theirs)
    name = "model.layers.1.self_attn.o_proj.weight"
    reply = mine.store.do(UpdateFromTensors(save({name: before[name] + 1.0})))
    assert reply.ok, reply.message
    assert torch.equal(values_of(mine)[name], before[name] + 1.0)
    assert torch.equal(values_of(theirs)[name], before[name])
    again = runner_of(model, cache, dtype="float32")
    assert torch.equal(values_of(again)[name], before[name])
    for runner in (mine, theirs, again):
        runner.close()


def test_memory_is_released_and_comes_back(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, str(tmp_path / "cache"), dtype="float32")
    before = values_of(runner)
    assert runner.store.do(ReleaseMemory(("weights",))).ok
    reply = runner.store.do(ResumeMemory(("weights",)))
    assert reply.ok, reply.message
    for name, value in values_of(runner).items():
        assert torch.equal(value, before[name]), name
    runner.close()


def test_the_cache_takes_no_more_than_it_may(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for quantize in ("none", "int8", "int4"):
        runner_of(model, str(cache), quantize=quantize, weights_cache_gb=0.01).close()
        gc.collect()
        assert sum(path.stat().st_size for path in cache.iterdir()) <= 10_000_000
    assert len(names_in(cache)) == 2
