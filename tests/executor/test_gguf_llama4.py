"""Files of Llama 4, under the names of gguf's own table, compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.caches import set_own_cache
from tests.executor.driver import Turn, make_driver
from tests.executor.gguf_files import plain, write_gguf
from tests.executor.gguf_models import TOKENS, described, metadata
from tests.models.many import Checkpoint, saved
from weft.config.model import ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
KEYS: dict[str, Any] = {
    "block_count": 4,
    "expert_count": 8,
    "expert_used_count": 1,
    "expert_feed_forward_length": 32,
    "interleave_moe_layer_step": 2,
}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    set_own_cache(tmp_path / "cache", monkeypatch)
    config = Llama4TextConfig(**SHAPE, attn_implementation="eager")
    return saved(Llama4ForCausalLM(config), tmp_path / "model")


def converted(model: Any) -> dict[str, Tensor]:
    """The tensors of a file: as in the checkpoint, but each expert's outputs before its inputs, and
    gates and ups apart."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA4, 4)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            gates, ups = tensor.mT.chunk(2, dim=1)
            base = name.removesuffix("gate_up_proj")
            parts = {f"{base}gate_proj.weight": gates, f"{base}up_proj.weight": ups}
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": tensor.mT}
        for part, values in parts.items():
            theirs = names.get_name(part, try_suffixes=(".weight",))
            assert theirs is not None, part
            found[theirs] = values
    default = 5_000.0 ** (-torch.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    return {**found, "rope_freqs.weight": default / scaled}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_converted_file_computes_what_transformers_does(
    checkpoint: Checkpoint, tmp_path: Path, kernels: str
) -> None:
    tensors = {name: plain(tensor) for name, tensor in converted(checkpoint.model).items()}
    file = write_gguf(tmp_path / "a.gguf", metadata("llama4", **KEYS), tensors)
    folder = described(file)
    tokens = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    driver = make_driver(ModelConfig.from_folder(folder), folder, kernels=kernels, dtype="float32")
    found = driver.run(Turn(0, tokens))[0]
    driver.runner.close()
    expected = checkpoint.logits(tokens)[-1].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
