"""Models whose indexer chooses the keys that are attended to; that they compute what transformers
computes is tried in `test_many_families.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.driver import Turn, make_driver
from tests.models.many import LATENT_FAMILIES, SHAPE, VOCAB, make_checkpoint
from weft.config.model import ModelConfig, UnsupportedModel
from weft.config.options import SettingsError
from weft.executor.kv_pool import KVPool
from weft.executor.outside.attention import own_backend

TOKENS = np.random.default_rng(8).integers(0, VOCAB, 70).tolist()


def config_of(name: str, **changes: Any) -> ModelConfig:
    kind, family = LATENT_FAMILIES[name]
    config = {**SHAPE, **family, "architectures": [f"{kind}ForCausalLM"], "rms_norm_eps": 1e-6}
    return ModelConfig.from_hf({**config, "max_position_embeddings": 4_096, **changes}, "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek-v3.2", tmp_path_factory.mktemp("sparse")).folder


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_chosen_has_the_same_bits_however_a_prompt_is_cut(
    folder: Path, threads: int
) -> None:
    config = ModelConfig.from_folder(folder)
    driver = make_driver(config, folder, kernels="auto", threads=threads)
    whole = driver.run(Turn(0, TOKENS))[0]
    for row, sizes in enumerate(([1, 30, 1, 1, 20], [33, 30], [50] + [1] * 18), 1):
        begin = 0
        for size in sizes:
            # Beside another request, which stays below what is chosen, or has just passed it.
            beside = Turn(4, TOKENS[begin : begin + 1])
            driver.run(Turn(row, TOKENS[begin : begin + size]), beside)
            begin += size
        assert torch.equal(driver.run(Turn(row, TOKENS[begin:]))[0], whole)
    driver.runner.close()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_token_beyond_what_is_chosen_attends_to_less(folder: Path, kernels: str) -> None:
    path = folder / "config.json"
    sparse = json.loads(path.read_text())
    found = []
    for num_tokens in (32, 33):
        for num_chosen in (32, 128):
            config = ModelConfig.from_hf({**sparse, "index_topk": num_chosen}, "model")
            driver = make_driver(config, folder, kernels=kernels)
            found.append(driver.run(Turn(0, TOKENS[:num_tokens]))[0])
            driver.runner.close()
    assert torch.equal(found[0], found[1])
    assert float((found[2] - found[3]).abs().max()) > 1e-3


def test_the_keys_of_an_indexer_are_kept_beside_latents(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert config.kv_bytes_per_token == config.num_layers * (24 + 8 + 16) * 4
    pool = KVPool(config, 7, torch.device("cpu"), torch.float32)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors)
    assert num_bytes == 7 * config.kv_bytes_per_token


def test_attention_from_outside_is_refused_where_keys_are_chosen(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    pool = KVPool(config, 7, torch.device("cpu"), torch.float32)
    with pytest.raises(SettingsError, match="has an indexer, which weft's own backends alone have"):
        own_backend("collections:Counter", config, pool, 128)


def test_contexts_end_at_what_is_chosen_only_where_layers_share_a_choice() -> None:
    assert config_of("deepseek-v3.2").max_position == 4_096
    assert config_of("glm5").max_position == 4_096
    for shared in (
        {"index_topk_pattern": "FSFS"},
        {"indexer_types": ["full", "shared"] * 2},
        {"index_topk_freq": 2},
    ):
        assert config_of("glm5", **shared).max_position == 32
    assert config_of("glm5", index_topk=None, index_topk_freq=2).max_position == 2_048
    assert config_of("glm5", indexer_types=["full"] * 4, index_topk_freq=2).max_position == 4_096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_head_dim": 24}, "index_head_dim is 24; multiples of 16"),
        ({"index_topk_pattern": 5}, "index_topk_pattern is 5; a list of 'F' or 'S' or"),
        ({"indexer_types": ["none"]}, "indexer_types is .'none'.; a list of"),
        ({"qk_rope_head_dim": 32, "kv_lora_rank": 32}, "must be at least qk_rope_head_dim, which"),
        ({"kv_lora_rank": 20}, r"qk_rope_head_dim \+ kv_lora_rank is 28; multiples of 16"),
    ],
)
def test_sizes_that_are_not_computed_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_of("deepseek-v3.2", **changes)
