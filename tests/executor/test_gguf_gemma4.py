"""Files of Gemma 4: other heads in layers that see all tokens, and the sizes' own mechanisms."""

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
    stored,
    tensors_of,
    write_folder,
)
from weft.config.model import BadCheckpoint, ModelConfig, UnsupportedModel

KINDS = ["sliding_attention", "full_attention"] * 2
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 5_000.0,
        "partial_rotary_factor": 0.25,
    },
}
LARGE: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "sliding_window": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": ROPES,
}
LARGE_KEYS: dict[str, Any] = {
    "block_count": 4,
    "attention__key_length": 32,
    "attention__value_length": 32,
    "attention__key_length_swa": 16,
    "attention__value_length_swa": 16,
    "attention__head_count_kv": np.array([2, 1, 2, 1], dtype=np.int32),
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": np.array([True, False] * 2),
    "attention__shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope__dimension_count": 32,
    "rope__dimension_count_swa": 16,
    "rope__freq_base_swa": 500.0,
}
SMALL = {
    **LARGE,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
}
SMALL_KEYS = {
    **LARGE_KEYS,
    "attention__head_count_kv": 2,
    "attention__shared_kv_layers": 2,
    "embedding_length_per_layer_input": 32,
    "feed_forward_length": np.array([96, 96, 192, 192], dtype=np.int32),
}
EXPERTS = {
    **LARGE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
EXPERT_KEYS = {
    **LARGE_KEYS,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
}
# The frequencies of the pairs that do not turn are divided by this.
ROPE_FREQS = torch.tensor([1.0] * 4 + [1e30] * 12)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights; no two norms of a layer are equal."""
    found = hf_weights("gemma4", **config)
    for index, (name, weight) in enumerate(found.items()):
        if "norm" in name:
            weight += 0.1 * (index % 23)
    return found


def tensors(config: dict[str, Any]) -> dict[str, Stored]:
    found = stored(weights_of(config), "gemma4")
    return {**found, "rope_freqs.weight": plain(ROPE_FREQS)}


def as_converted(config: dict[str, Any]) -> dict[str, Stored]:
    """Gates and ups of experts in one tensor; the layers that read the K and V of others have
    projections that nobody uses."""
    found = tensors_of(weights_of(config), "gemma4")
    for layer in range(4):
        block = f"blk.{layer}"
        if f"{block}.ffn_gate_exps.weight" in found:
            both = [found.pop(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            found[f"{block}.ffn_gate_up_exps.weight"] = torch.cat(both, 1)
        if f"{block}.attn_k.weight" not in found:
            size = 64 if layer % 2 else 32
            found[f"{block}.attn_k.weight"] = torch.ones(size, 64)
            found[f"{block}.attn_v.weight"] = torch.ones(size, 64)
            found[f"{block}.attn_k_norm.weight"] = torch.ones(size // 2)
    files = {name: plain(tensor) for name, tensor in found.items()}
    return {**files, "rope_freqs.weight": plain(ROPE_FREQS)}


@pytest.mark.parametrize("make", [tensors, as_converted])
@pytest.mark.parametrize(
    ("config", "keys"), [(LARGE, LARGE_KEYS), (SMALL, SMALL_KEYS), (EXPERTS, EXPERT_KEYS)]
)
def test_a_file_computes_what_its_safetensors_do(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, Any], make: Any
) -> None:
    folder = write_folder(tmp_path / "folder", weights_of(config), "gemma4", **config)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("gemma4", **keys), make(config))
    tokens = torch.randint(0, len(TOKENS), (40,), generator=torch.Generator().manual_seed(3))
    logprobs = []
    for source in (folder, described(file)):
        driver = make_driver(ModelConfig.from_folder(source), source, kernels="torch")
        logprobs.append(driver.run(Turn(0, tokens.tolist()))[0])
        driver.runner.close()
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=2e-4, rtol=0)


def test_an_older_file_has_no_factors_of_layers(tmp_path: Path) -> None:
    without = {name: one for name, one in tensors(LARGE).items() if "output_scale" not in name}
    file = write_gguf(tmp_path / "tiny.gguf", metadata("gemma4", **LARGE_KEYS), without)
    model = ModelConfig.from_folder(described(file))
    assert not any(layer.has_factor for layer in model.decoder.layers)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        (
            {"rope__dimension_count_swa": 8},
            UnsupportedModel,
            "rope.dimension_count_swa is 8, but heads with windows have 16 values",
        ),
        (
            {"feed_forward_length": np.array([96, 192, 192, 192], dtype=np.int32)},
            UnsupportedModel,
            r"feed_forward_length is \[96, 192, 192, 192\]; supported is one size, or twice",
        ),
        (
            {"feed_forward_length": np.array([96, 96], dtype=np.int32)},
            BadCheckpoint,
            "feed_forward_length has 2 layers of 4",
        ),
        (
            {"embedding_length_per_layer_input": 64},
            BadCheckpoint,
            r"per_layer_token_embd.weight is \[260, 128\]; its metadata says \[260, 256\]",
        ),
        (
            {"attention__head_count_kv": np.array([2, 1, 2, 1], dtype=np.int32)},
            BadCheckpoint,
            r"blk.1.attn_k.weight is \[64, 64\]; its metadata says \[32, 64\]",
        ),
        (
            {"attention__sliding_window_pattern": None},
            BadCheckpoint,
            "has no gemma4.attention.sliding_window_pattern",
        ),
        (
            {"attention__shared_kv_layers": 2**32 - 1},
            BadCheckpoint,
            "attention.shared_kv_layers is 4,294,967,295; it must be 0 to 3",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    keys = {**SMALL_KEYS, **changes}
    file = write_gguf(tmp_path / "tiny.gguf", metadata("gemma4", **keys), tensors(SMALL))
    with pytest.raises(error, match=told):
        described(file)
