"""What is particular to attention by latents; that it computes what transformers computes is tried
in `test_many_families.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.machines import machine
from tests.models.many import make_checkpoint
from weft.config.decoder import LatentSpec
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.projections import projections
from weft.config.resolve import resolve
from weft.executor.kv_pool import KVPool
from weft.models.layers.latent import HeadMatrices
from weft.ops.plain import PlainOps

RANK = 24
ROTATED = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("minicpm3", tmp_path_factory.mktemp("latents")).folder


def test_the_cache_keeps_the_latent_and_the_rotated_part_of_a_token_once(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert config.kv_bytes_per_token == config.num_layers * (RANK + ROTATED) * 4
    pool = KVPool(config, 7, CPU, torch.float32)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors)
    assert num_bytes == 7 * config.kv_bytes_per_token


@pytest.mark.parametrize("size", [64, 128, 400])
def test_heads_get_their_rows_in_whatever_pieces_a_tensor_comes(size: int) -> None:
    latent = LatentSpec(rank=16, query_rank=0, plain_dim=20, rotated_dim=8, value_dim=60)
    heads = HeadMatrices(5, latent, PlainOps(torch.float32, CPU))
    weight = heads.weight("kv_b_proj.weight")
    content = torch.randn(400, 16)
    for start in range(0, 400, size):
        weight.put(content[start : start + size], start)
    assert torch.equal(heads.keys[3].get(0), content[240:260].T)
    assert torch.equal(heads.values[4].get(0), content[340:400])
    assert torch.equal(weight.get(), content)
    assert torch.equal(weight.get(64, 192), content[64:192])


def test_eight_bits_are_refused_for_a_latent(folder: Path) -> None:
    model = ModelConfig.from_folder(folder)
    with pytest.raises(SettingsError, match=r"--kv-dtype is int8.*one vector for all heads"):
        resolve(EngineConfig(device="cpu", kv_dtype="int8"), model, machine(8))


def test_heads_of_a_latent_are_not_divided_between_ranks(folder: Path) -> None:
    model = replace(ModelConfig.from_folder(folder), name="small")
    with pytest.raises(SettingsError, match="small has attention by latents, which are not divid"):
        resolve(EngineConfig(device="cpu", tp_size=2), model, machine(8))


def test_adapters_may_change_all_but_what_makes_keys_and_values_of_latents(folder: Path) -> None:
    found = projections(ModelConfig.from_folder(folder))
    prefix = "model.layers.0.self_attn."
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == {
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
    }
