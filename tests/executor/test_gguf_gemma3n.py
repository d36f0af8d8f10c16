"""Files of Gemma 3n: matrices of streams in one tensor, and sizes by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.caches import set_own_cache
from tests.executor.driver import Turn, make_driver
from tests.executor.gguf_files import Stored, plain, write_gguf
from tests.executor.gguf_models import (
    TOKENS,
    described,
    hf_weights,
    metadata,
    tensors_of,
    write_folder,
)
from weft.config.model import BadCheckpoint, ModelConfig

KINDS = ["sliding_attention", "full_attention"] * 6
CONFIG: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_hidden_layers": 12,
    "layer_types": KINDS,
    "sliding_window": 16,
    "num_kv_shared_layers": 4,
    "intermediate_size": [96, 64] * 6,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 256,
    "altup_num_inputs": 3,
    "altup_active_idx": 0,
    "laurel_rank": 32,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5_000.0},
    },
}
KEYS: dict[str, Any] = {
    "block_count": 12,
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": np.array([True, False] * 6),
    "attention__shared_kv_layers": 4,
    "feed_forward_length": np.array([96, 64] * 6, dtype=np.int32),
    "embedding_length_per_layer_input": 32,
    "altup__num_inputs": 3,
    "altup__active_idx": 0,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


def weights_of() -> dict[str, torch.Tensor]:
    """Random weights; no two norms of a layer are equal."""
    found = hf_weights("gemma3n", **CONFIG)
    for index, (name, weight) in enumerate(found.items()):
        if "norm" in name:
            weight += 0.1 * (index % 23)
    return found


def tensors() -> dict[str, Stored]:
    """The matrices of all streams stand in one tensor."""
    weights = weights_of()
    for name in ("altup_projections", "altup_unembed_projections"):
        parts = [weights.pop(f"model.{name}.{part}.weight") for part in range(2)]
        weights[f"model.{name}.weight"] = torch.stack(parts)
    return {name: plain(tensor) for name, tensor in tensors_of(weights, "gemma3n").items()}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_file_computes_what_its_safetensors_do(tmp_path: Path, kernels: str) -> None:
    folder = write_folder(tmp_path / "folder", weights_of(), "gemma3n", **CONFIG)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("gemma3n", **KEYS), tensors())
    tokens = torch.randint(0, len(TOKENS), (40,), generator=torch.Generator().manual_seed(3))
    tokens[3] = len(TOKENS) - 1  # has the first row of the table
    logprobs = []
    for source in (folder, described(file)):
        driver = make_driver(ModelConfig.from_folder(source), source, kernels=kernels)
        logprobs.append(driver.run(Turn(0, tokens.tolist()))[0])
        driver.runner.close()
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=2e-4, rtol=0)


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    keys = {**KEYS, "embedding_length_per_layer_input": 64}
    file = write_gguf(tmp_path / "tiny.gguf", metadata("gemma3n", **keys), tensors())
    with pytest.raises(BadCheckpoint, match=r"per_layer_token_embd.weight is \[256, 384\]"):
        described(file)
